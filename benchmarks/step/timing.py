"""Step times of every subspace variant against the dense model, in interleaved pairs.

At most two models are in memory at a time: the dense one stays, the subspace ones come and go.
"""

from collections.abc import Callable, Sequence

from benchmarks.pairs import PairedRatio, Timed, compare
from benchmarks.step.config import StepConfig
from benchmarks.step.training_step import TrainingStep
from benchmarks.step.variants import Variant, dense_variant


def steps_to_time(config: StepConfig, variants: Sequence[Variant]) -> int:
    """How often `advance` will be called."""
    return len(variants) * len(config.seqs) * 2 * (config.warmup + config.pairs)


def time_steps(
    config: StepConfig, variants: Sequence[Variant], advance: Callable[[], None]
) -> dict[tuple[Variant, int], PairedRatio]:
    """Ratios subspace / dense by variant and sequence length; `advance` is called after every step."""
    dense = TrainingStep(dense_variant(config), device=config.device, bf16=config.bf16)
    ratios = {}
    for variant in variants:
        subspace = TrainingStep(variant, device=config.device, bf16=config.bf16)
        for seq in config.seqs:
            for step in (dense, subspace):
                step.set_batch(config.tokens // seq, seq)
            ratios[variant, seq] = compare(
                _counted(dense, advance), _counted(subspace, advance), pairs=config.pairs, warmup=config.warmup
            )
    return ratios


def _counted(step: TrainingStep, advance: Callable[[], None]) -> Timed:
    def timed() -> float:
        seconds = step.timed()
        advance()
        return seconds

    return timed
