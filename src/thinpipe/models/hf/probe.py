"""Proves that the segments of a Hugging Face model compute what the whole model computes, on a small model of the same
structure with random weights: in seconds, without the model's own weights.

No list of model types is trusted: a new version of transformers may change any of them. The small model is written to
a folder, and its segments read it as they would read the real one. Required: losses and every gradient are equal bit
for bit. Only found out, for whoever asks for it: texts packed into one row, LoRA adapters, dropout.
"""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from thinpipe.core.errors import UserError
from thinpipe.models.hf.layer_plan import UnsupportedModelError
from thinpipe.models.hf.pretrained_config import dropout_rates
from thinpipe.models.hf.probe_lora import compare_adapters
from thinpipe.models.hf.probe_trial import Trial


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was tried."""

    name: str
    works: bool
    detail: str
    is_required: bool = False
    """Whether the model cannot be trained in segments without it."""


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What works with a model."""

    model_type: str
    checks: tuple[Check, ...]

    @property
    def refusal(self) -> str | None:
        """Why the model cannot be trained in segments; None if it can."""
        return next((check.detail for check in self.checks if check.is_required and not check.works), None)

    def works(self, name: str) -> bool:
        return any(check.works for check in self.checks if check.name == name)


def probe(stored: Mapping[str, Any]) -> ProbeResult:
    """Tries the model of a config.json. Raises nothing for a model that cannot be cut: that is a result."""
    checks = list[Check]()
    with tempfile.TemporaryDirectory(prefix="thinpipe-probe-") as folder, torch.random.fork_rng(devices=[]):
        trial: Trial | None = None
        for name, (is_required, run) in CHECKS.items():
            try:
                trial = trial or Trial.of(stored, Path(folder))
                detail, works = run(trial), True
            except UnsupportedModelError as error:
                detail, works = str(error), False
            except Exception as error:  # code of a model that transformers, or a newer one, has: any exception
                first_line = str(error).strip().partition("\n")[0]
                detail, works = f"{type(error).__name__}: {first_line}".removesuffix(": "), False
            checks.append(Check(name=name, works=works, detail=detail, is_required=is_required))
            if is_required and not works:
                break
    return ProbeResult(model_type=str(stored.get("model_type", "")), checks=tuple(checks))


def refuse_unsupported(result: ProbeResult) -> None:
    """Raises UserError unless the model can be trained in segments."""
    if result.refusal is not None:
        raise UserError(f"{result.model_type} cannot be trained in segments: {result.refusal}")


def _segments(trial: Trial) -> str:
    return trial.describe()


def _losses(trial: Trial) -> str:
    """The first state that differs is named, or the losses."""
    trial.compare_states()
    return f"equal bit for bit in {len(trial.model.segments)} segments"


def _gradients(trial: Trial) -> str:
    return f"{trial.compare_gradients()} of all parameters, equal bit for bit"


def _recomputation(trial: Trial) -> str:
    for mode in ("block", "segment"):
        trial.compare_recomputation(mode)
    return "gradients equal bit for bit when blocks or segments are computed again"


def _lora(trial: Trial) -> str:
    return f"{compare_adapters(trial)} adapters' gradients, equal to peft's on the whole model bit for bit"


def _packing(trial: Trial) -> str:
    return trial.compare_packing()


def _dropout(trial: Trial) -> str:
    rates = dropout_rates(trial.stored)
    if not rates:
        return "none in config.json"
    trial.compare_dropout()
    named = ", ".join(f"{name} {rate:g}" for name, rate in rates.items())
    return f"{named}: masks from our own hash, equal in one segment and in several"


CHECKS: Mapping[str, tuple[bool, Callable[[Trial], str]]] = {
    "segments": (True, _segments),
    "losses": (True, _losses),
    "gradients": (True, _gradients),
    "recomputation": (False, _recomputation),
    "LoRA": (False, _lora),
    "packing": (False, _packing),
    "dropout": (False, _dropout),
}
"""Check by name: whether it is required, and what runs it; raises UnsupportedModelError if it fails."""
