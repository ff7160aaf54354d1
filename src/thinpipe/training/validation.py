"""The validation loss of a run: over its validation text, or over that of each source of a mixture and their mean."""

import math
import time
from collections.abc import Sequence
from itertools import islice

from thinpipe.core.events import SourceLoss, Validated
from thinpipe.training.data_loading import BatchLoader, ValidationSource
from thinpipe.training.engine import Engine


def validate(engine: Engine, batch_loader: BatchLoader, finished_steps: int) -> Validated:
    """Measures the loss. Collective call."""
    started, info = time.monotonic(), batch_loader.dataset_info
    batches = iter(batch_loader.validation_batches())
    if not info.validation_sources:
        loss, tokens = engine.evaluate(batches)
        return _event(finished_steps, started, loss, _bits(loss, info.bits_per_byte_per_nat), tokens)
    losses, sources = list[float](), list[SourceLoss]()
    for source in info.validation_sources:
        loss, tokens = engine.evaluate(islice(batches, source.batches))
        losses.append(loss)
        bits = _bits(loss, source.bits_per_byte_per_nat)
        sources.append(SourceLoss(name=source.name, loss=_finite(loss), bits_per_byte=_finite(bits), tokens=tokens))
    loss, bits = mean_over_sources(info.validation_sources, losses)
    return _event(finished_steps, started, loss, bits, sum(source.tokens for source in sources), sources)


def mean_over_sources(sources: Sequence[ValidationSource], losses: Sequence[float]) -> tuple[float, float | None]:
    """Loss and bits per byte of text that is mixed as the training text is; bits only if all sources have them."""
    weighted = math.fsum(source.weight * loss for source, loss in zip(sources, losses, strict=True))
    weight = sum(source.weight for source in sources)
    nats = [source.weight / source.bits_per_byte_per_nat for source in sources if source.bits_per_byte_per_nat]
    return weighted / weight, weighted / math.fsum(nats) if len(nats) == len(sources) else None


def _event(
    step: int, started: float, loss: float, bits: float | None, tokens: int, sources: Sequence[SourceLoss] = ()
) -> Validated:
    seconds, bits = time.monotonic() - started, _finite(bits)
    return Validated(
        step=step, loss=_finite(loss), bits_per_byte=bits, tokens=tokens, seconds=seconds, sources=list(sources)
    )


def _bits(loss: float, per_nat: float | None) -> float | None:
    return None if per_nat is None else loss * per_nat


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
