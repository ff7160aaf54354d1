"""Compares two things on a noisy machine: interleaved pairs, the median of their ratios and an exact interval for it.

Knows nothing of what is timed. The interval is the distribution-free one from order statistics: the median of a
continuous distribution lies between the r-th smallest and the r-th largest of n independent values with probability
1 − 2 P(Binomial(n, 1/2) < r), whatever the distribution. It needs no normality, and outliers do not stretch it much.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Timed = Callable[[], float]
"""Does the work once and returns the seconds it took."""


@dataclass(frozen=True, kw_only=True)
class PairedRatio:
    """Second over first, pair by pair."""

    median: float
    low: float
    high: float
    """[low, high] holds the median of the distribution with probability `coverage`."""
    coverage: float
    """At least 0.95; larger because only whole order statistics can be taken (0.979 for 10 pairs)."""
    first_seconds: tuple[float, ...]
    second_seconds: tuple[float, ...]

    @property
    def first_median_seconds(self) -> float:
        return statistics.median(self.first_seconds)

    @property
    def second_median_seconds(self) -> float:
        return statistics.median(self.second_seconds)


def compare(first: Timed, second: Timed, *, pairs: int, warmup: int) -> PairedRatio:
    """Times `pairs` pairs in the order AB BA AB ..., so that drift and the cost of going second cancel out."""
    for _ in range(warmup):
        first()
        second()
    first_seconds, second_seconds = [], []
    for index in range(pairs):
        if index % 2 == 0:
            first_seconds.append(first())
            second_seconds.append(second())
        else:
            second_seconds.append(second())
            first_seconds.append(first())
    return paired_ratio(first_seconds, second_seconds)


def paired_ratio(first_seconds: Sequence[float], second_seconds: Sequence[float]) -> PairedRatio:
    """The ratios' median with its 95 % interval."""
    ratios = [second / first for first, second in zip(first_seconds, second_seconds, strict=True)]
    low, high, coverage = median_interval(ratios)
    return PairedRatio(
        median=statistics.median(ratios),
        low=low,
        high=high,
        coverage=coverage,
        first_seconds=tuple(first_seconds),
        second_seconds=tuple(second_seconds),
    )


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """(low, high, coverage): the narrowest symmetric order-statistic interval with at least this confidence."""
    count = len(values)
    outside, rank = 0.0, 0  # outside = P(the median lies beyond the rank-th smallest or the rank-th largest value)
    while True:
        wider = outside + 2 * math.comb(count, rank) / 2**count
        if wider > 1 - confidence or rank >= count // 2:
            break
        outside, rank = wider, rank + 1
    if rank == 0:
        raise ValueError(f"{count} values are too few for a {confidence:.0%} interval of their median")
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank], 1 - outside
