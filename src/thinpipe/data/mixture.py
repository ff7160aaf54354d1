"""Which source of a mixture has the sample at each position of a run: a pure function of the weights.

Positions are dealt in cycles, as many as the weights add up to, in which each source has as many as its weight. Within
them the chairman assignment (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980) keeps every
source less than one sample from its share, at every moment. Whole numbers only, hence the same on every platform.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


class Mixture:
    """`weights`: whole numbers, at least 1."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights = np.array(weights, np.int64)
        self._cycle = np.array(_deal(weights), np.int64)
        self._earlier = np.empty_like(self._cycle)
        """Of each position of a cycle: how many before it are of the same source."""
        for source in range(len(weights)):
            own = self._cycle == source
            self._earlier[own] = np.arange(own.sum())

    def at(self, positions: Ids) -> tuple[Ids, Ids]:
        """Sources of these positions, and how many earlier positions of the run are of the same source."""
        cycles, places = np.divmod(positions, len(self._cycle))
        sources = self._cycle[places]
        return sources, cycles * self._weights[sources] + self._earlier[places]


def _deal(weights: Sequence[int]) -> list[int]:
    """The sources of one cycle. At each position those that are far enough behind their share compete, and the one that
    would be too late first gets it."""
    if len(weights) == 1:
        return [0] * weights[0]
    total, twice = sum(weights), 2 * len(weights) - 2
    of_weight = [math.lcm(*weights) // weight for weight in weights]
    dealt, had = [], [0] * len(weights)
    for position in range(1, total + 1):
        behind = [weight * position - total * count for weight, count in zip(weights, had, strict=True)]
        eligible = [source for source, amount in enumerate(behind) if twice * amount >= total]
        chosen = min(eligible, key=lambda source: ((twice - 1) * total - twice * behind[source]) * of_weight[source])
        dealt.append(chosen)
        had[chosen] += 1
    return dealt
