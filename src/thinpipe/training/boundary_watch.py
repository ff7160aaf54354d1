"""Watches what crosses the boundaries of a run: sudden changes, and ends that report different figures.

Running means and deviations of the figures that both ends of a boundary contribute to the sum of a step, as in SENTINEL
(arXiv 2603.03592), which watches activations and gradients by exponential moving averages. Pure: every process, and
the hub, reaches the same verdict. A change that is smaller than what text and training change by themselves is not
seen, and neither is a peer that has sent the same from the first step on.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from thinpipe.core.audit_events import BoundaryAlarm
from thinpipe.training.step_outcome import BoundaryFigures

_WARM_UP_STEPS = 50
"""Steps of which figures are learned before any is judged; also the memory of the running statistics."""
_DEVIATIONS = 6.0
_FLOOR = {"size": 0.05, "mean": 0.05, "ends differ in size": 0.002, "ends differ in mean": 0.002}
"""A change is sudden beyond this many mean absolute deviations and this floor, chosen on one seed of honest runs
(benchmarks/liars)."""
_STEPS_IN_A_ROW = 3
"""A single batch may be odd: this many steps in a row have to be beyond the limit."""


@dataclass
class RunningStatistics:
    """Exponential moving mean and mean absolute deviation. What lies beyond the limit moves them as if it lay on it."""

    floor: float
    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    in_a_row: int = 0
    """Figures beyond the limit, up to now."""

    @property
    def limit(self) -> float:
        return _DEVIATIONS * self.deviation + self.floor

    def add(self, figure: float) -> bool:
        """True if the last figures were all beyond the limit; the statistics then start afresh."""
        distance = figure - self.mean
        learning = self.count < _WARM_UP_STEPS
        beyond = not learning and abs(distance) > self.limit
        self.in_a_row = self.in_a_row + 1 if beyond else 0
        if self.in_a_row == _STEPS_IN_A_ROW:
            return True
        if beyond:
            distance = math.copysign(self.limit, distance)
        self.count += 1
        rate = 1 / min(self.count, _WARM_UP_STEPS)
        self.mean += rate * distance
        self.deviation += rate * (abs(distance) - self.deviation) if self.count > 1 else 0.0
        return False


class BoundaryWatch:
    """`process_of_segment`: rank by segment. `name_of`: name of a process by rank. `basis_interval`: steps between two
    changes of basis, with which the means of coordinates change; 0: none."""

    def __init__(
        self, process_of_segment: Sequence[int], name_of: Callable[[int], str], *, basis_interval: int = 0
    ) -> None:
        self._process_of_segment, self._name_of = process_of_segment, name_of
        self._basis_interval = basis_interval
        self._statistics: dict[tuple[int, bool, str], RunningStatistics] = {}

    def observe(self, step: int, figures: Iterable[BoundaryFigures]) -> list[BoundaryAlarm]:
        """`step`: number of the good step, from 1."""
        if self._basis_interval and (step - 1) % self._basis_interval == 0:
            self._statistics = {key: found for key, found in self._statistics.items() if key[2] != "mean"}
        return [alarm for each in figures for alarm in self._alarms(step, each)]

    def _suspects(self, boundary: int, forward: bool, kind: str) -> list[str]:
        """The sender; where the ends differ, the receiver too."""
        ends = self._process_of_segment[boundary], self._process_of_segment[boundary + 1]
        sender, receiver = ends if forward else ends[::-1]
        return [self._name_of(rank) for rank in dict.fromkeys((sender, receiver) if "differ" in kind else (sender,))]

    def _alarms(self, step: int, ends: BoundaryFigures) -> Iterable[BoundaryAlarm]:
        for kind, figure in _figures(ends).items():
            key = ends.boundary, ends.forward, kind
            statistics = self._statistics.setdefault(key, RunningStatistics(_FLOOR[kind]))
            usual, limit = statistics.mean, statistics.limit
            if statistics.add(figure):
                del self._statistics[key]
                yield BoundaryAlarm(
                    step=step,
                    boundary=ends.boundary,
                    forward=ends.forward,
                    kind=kind,
                    figure=figure,
                    usual=usual,
                    limit=limit,
                    peers=self._suspects(ends.boundary, ends.forward, kind),
                )


def _figures(ends: BoundaryFigures) -> dict[str, float]:
    """The figures that can be compared: not those of values that are all zero or not finite."""
    sent, received = ends.sent, ends.received
    figures = dict[str, float]()
    if 0 < received.rms < math.inf and abs(received.mean) < math.inf:
        figures["size"], figures["mean"] = math.log(received.rms), received.mean / received.rms
        if 0 < sent.rms < math.inf and abs(sent.mean) < math.inf:
            figures["ends differ in size"] = math.log(sent.rms / received.rms)
            figures["ends differ in mean"] = (sent.mean - received.mean) / received.rms
    return figures
