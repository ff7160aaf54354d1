"""The two fits that PREREGISTRATION.md names: a power law over widths, and a straight line over boundaries."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
EXPONENTS: Floats = np.arange(-400, 801) / 100
"""Exponents b among which the fit chooses."""
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class PowerLaw:
    """gap = c d^-b."""

    c: float
    b: float
    low: float
    """2.5th percentile of b over all resamples of seeds."""
    high: float
    """97.5th percentile."""

    @property
    def shrinks_with_width(self) -> bool:
        return self.low > 0


def fit_power_law(gaps: Mapping[int, Sequence[float]]) -> PowerLaw:
    """Least squares over the mean gaps (in %) of each width, and the bootstrap over seeds: `gaps` has one per seed.

    The bootstrap counts every resample of the seeds of each width once, so no random numbers are drawn.
    """
    widths = np.array(list(gaps), dtype=np.float64)
    means = np.array([[np.mean(each) for each in gaps.values()]])
    resampled = [
        np.array([np.mean(sample) for sample in itertools.product(each, repeat=len(each))]) for each in gaps.values()
    ]
    of_resamples = np.stack([axis.ravel() for axis in np.meshgrid(*resampled, indexing="ij")], axis=1)
    c, b = _least_squares(widths, means)
    low, high = np.percentile(_least_squares(widths, of_resamples)[1], PERCENTILES)
    return PowerLaw(c=float(c[0]), b=float(b[0]), low=float(low), high=float(high))


def _least_squares(widths: Floats, means_NW: Floats) -> tuple[Floats, Floats]:
    """c and b of N fits over W widths. For each exponent the best c, at least 0, is known; the best exponent is chosen
    among EXPONENTS, the lowest if all are equal."""
    scale = widths[0]
    curves_EW = (widths / scale) ** -EXPONENTS[:, None]
    factors_NE = np.maximum(means_NW @ curves_EW.T / (curves_EW**2).sum(axis=1), 0.0)
    errors_NE = ((means_NW[:, None, :] - factors_NE[:, :, None] * curves_EW) ** 2).sum(axis=2)
    best_N = errors_NE.argmin(axis=1)
    b_N = EXPONENTS[best_N]
    return factors_NE[np.arange(len(means_NW)), best_N] * scale**b_N, b_N


def slope(gaps: Mapping[int, Sequence[float]]) -> float:
    """Points per boundary: the straight line through the mean gaps (in %) of each number of boundaries."""
    line = np.polyfit(np.array(list(gaps), dtype=np.float64), [float(np.mean(each)) for each in gaps.values()], 1)
    return float(line[0])
