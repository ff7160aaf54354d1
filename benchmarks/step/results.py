"""What `python -m benchmarks.step` found, as plain numbers: the JSON line, the tables and the figure all read this.

Measures nothing and prints nothing.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.pairs import PairedRatio

TARGET_COMPRESSION = 100
"""The targets hold for k = d/100 at the dense model's shape."""
TARGET_TIME_RATIO = 0.90
TARGET_OPTIMIZER_RATIO = 0.80
GROWTH_ROWS = 0.1
"""Below this many d-wide rows per token we say that the activations of the two models grow alike."""
RESOLUTION_NBYTES = 2**20
"""Resident sets differ by this much for no reason."""


@dataclass(frozen=True, kw_only=True)
class VariantFacts:
    """What does not depend on the batch."""

    name: str
    width: int | None
    match: str
    hidden_dim: int
    trainable: int
    optimizer_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One subspace variant against the dense model at one sequence length; ratios are subspace / dense."""

    variant: str
    width: int
    match: str
    batch: int
    seq: int
    time: PairedRatio
    dense_peak_nbytes: int
    peak_nbytes: int

    @property
    def peak_ratio(self) -> float:
        return self.peak_nbytes / self.dense_peak_nbytes


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Memory at a fixed batch size over the sequence lengths, same shape; overheads are subspace − dense."""

    width: int
    batch: int
    seqs: tuple[int, ...]
    dense_peaks_nbytes: tuple[int, ...]
    peaks_nbytes: tuple[int, ...]
    dense_activations_nbytes: tuple[int, ...]
    activations_nbytes: tuple[int, ...]

    @property
    def peak_overheads_nbytes(self) -> list[int]:
        return [own - dense for own, dense in zip(self.peaks_nbytes, self.dense_peaks_nbytes, strict=True)]

    @property
    def activation_overheads_nbytes(self) -> list[int]:
        return [own - dense for own, dense in zip(self.activations_nbytes, self.dense_activations_nbytes, strict=True)]

    def grows(self, dim: int) -> bool:
        """Whether longer sequences make the activations' overhead larger, as far as a resident set can tell."""
        change = self.activation_overheads_nbytes[-1] - self.activation_overheads_nbytes[0]
        return change > RESOLUTION_NBYTES and self.activation_rows_per_token(dim) > GROWTH_ROWS

    def activation_rows_per_token(self, dim: int) -> float:
        """By how many d-wide float32 rows per token the activations' overhead grows: the slope of a straight line."""
        if len(self.seqs) < 2:
            return 0.0
        tokens = [self.batch * seq for seq in self.seqs]
        slope = statistics.linear_regression(tokens, self.activation_overheads_nbytes).slope
        return float(slope) / (4 * dim)


@dataclass(frozen=True, kw_only=True)
class Target:
    """A ratio that must not exceed its limit."""

    name: str
    limit: float
    value: float
    high: float
    """Upper end of the value's interval; the value itself where it is exact."""

    @property
    def reached(self) -> bool:
        """Judged by the value; `certain` is whether its whole interval agrees."""
        return self.value <= self.limit

    @property
    def certain(self) -> bool:
        return self.high <= self.limit


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Everything."""

    config: dict[str, Any]
    versions: dict[str, str]
    threads: int
    variants: tuple[VariantFacts, ...]
    comparisons: tuple[Comparison, ...]
    growth: tuple[Growth, ...]
    targets: tuple[Target, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the derived numbers beside the measured ones."""
        fields = {"bench": "step", **asdict(self)}
        for entry, comparison in zip(fields["comparisons"], self.comparisons, strict=True):
            entry["peak_ratio"] = comparison.peak_ratio
        for entry, growth in zip(fields["growth"], self.growth, strict=True):
            entry["activation_rows_per_token"] = growth.activation_rows_per_token(self.config["dim"])
            entry["grows"] = growth.grows(self.config["dim"])
        for entry, target in zip(fields["targets"], self.targets, strict=True):
            entry["reached"], entry["certain"] = target.reached, target.certain
        return fields


def judge(width: int, variants: Sequence[VariantFacts], comparisons: Sequence[Comparison]) -> tuple[Target, ...]:
    """The targets for this width at the dense model's shape: the time at each sequence length, then the optimiser."""
    dense = next(facts for facts in variants if facts.width is None)
    own = next(facts for facts in variants if facts.width == width and facts.match == "shape")
    times = [entry for entry in comparisons if entry.width == width and entry.match == "shape"]
    optimizer_ratio = own.optimizer_nbytes / dense.optimizer_nbytes
    return (
        *(
            Target(
                name=f"step time, sequence {entry.seq}",
                limit=TARGET_TIME_RATIO,
                value=entry.time.median,
                high=entry.time.high,
            )
            for entry in times
        ),
        Target(name="optimiser memory", limit=TARGET_OPTIMIZER_RATIO, value=optimizer_ratio, high=optimizer_ratio),
    )
