"""A mean that does not lag: of as many values before a place as after it, and none where either are too few."""

from collections.abc import Sequence
from itertools import accumulate


def smoothing_width(count: int) -> int:
    """Values in a mean, for so many in all: about a twentieth, odd, 5 to 201; 1 where there are hardly any."""
    return 2 * min(100, max(2, count // 40)) + 1 if count >= 10 else 1


def smoothed(places: Sequence[float], values: Sequence[float], width: int) -> tuple[list[float], list[float]]:
    """Places in the middle of `width` values, and their means. On a straight line it is the line itself."""
    sums, half = [0.0, *accumulate(values)], width // 2
    means = [(sums[start + width] - sums[start]) / width for start in range(len(values) - width + 1)]
    return list(places[half : half + len(means)]), means
