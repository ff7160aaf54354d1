"""How often a hub's run commits, and how fast each peer sends its part: pure, from sizes, lines and the time of a step.

A commit is safe when all of its state is at the hub. The next should not begin before that, so the interval is the
least number of steps in which the slowest peer has sent its part, with some time to spare. Lines are shared: of each
peer's, and of the hub's, which all peers use at once, state gets `share` and messages the rest.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from thinpipe.core.units import say_duration

MARGIN = 1.5
"""Lines are not always as fast as they were measured."""
LEAST_SECONDS = 10.0
"""Between two commits, however small the state: each one stops the work for as long as a disk takes."""
_ENOUGH = 5
"""Steps, to know what one takes."""


@dataclass(frozen=True, kw_only=True)
class CommitPlan:
    interval: int
    """In steps. The same for all peers of an epoch."""
    bytes_per_second: tuple[float, ...]
    """That each peer may send of its state."""
    send_seconds: float
    """Until the last part is at the hub."""

    def in_words(self, step_seconds: float) -> str:
        steps = "every step" if self.interval == 1 else f"every {self.interval} steps"
        lost = self.interval * step_seconds + self.send_seconds
        return f"commit {steps}: at most {say_duration(lost)} of work can be lost"


def plan_commits(
    *,
    state_nbytes: Sequence[float],
    up_bps: Sequence[float],
    hub_down_bps: float,
    share: float,
    step_seconds: float,
    most_steps: int,
    interval: int | None = None,
) -> CommitPlan:
    """`state_nbytes` and `up_bps` are of each peer. `interval`: if somebody has decided it already."""
    rates = allowances(state_nbytes, up_bps, hub_down_bps, share)
    send_seconds = max(nbytes / rate for nbytes, rate in zip(state_nbytes, rates, strict=True))
    if interval is None:
        steps = max(MARGIN * send_seconds, LEAST_SECONDS) / step_seconds
        interval = max(1, min(most_steps, math.ceil(steps)))
    return CommitPlan(interval=interval, bytes_per_second=tuple(rates), send_seconds=send_seconds)


def allowances(
    state_nbytes: Sequence[float], up_bps: Sequence[float], hub_down_bps: float, share: float
) -> list[float]:
    """Bytes a second for each. The hub's line is divided by what each has to send, so that all are done together."""
    total = sum(state_nbytes)
    return [share / 8 * min(up, hub_down_bps * nbytes / total) for nbytes, up in zip(state_nbytes, up_bps, strict=True)]


def predict_step_seconds(
    *, tokens: int, tokens_per_second: float, microbatches: int, peers: int, latency_s: float
) -> float:
    """Before any step was measured: the slowest part, the time in which a pipeline fills and empties, and the way of a
    message through all peers and back, and of the vote."""
    fill = (microbatches + peers - 1) / microbatches
    return tokens / tokens_per_second * fill + (2 * (peers - 1) + 1) * latency_s


class StepSeconds:
    """What a step takes: predicted, until some were measured."""

    def __init__(self) -> None:
        self._predicted, self._slower, self._count = 0.0, 1.0, 0
        self._latest = deque[float](maxlen=4 * _ENOUGH)

    def begin(self, predicted: float) -> float:
        """An epoch begins. What was measured in the last one is held against what had been predicted for that."""
        if self._count >= _ENOUGH:
            self._slower = median(self._latest) / self._predicted
        self._predicted, self._count = predicted, 0
        self._latest.clear()
        return predicted * self._slower

    def add(self, seconds: float) -> float | None:
        """The median, once in an epoch: when enough were measured to say it."""
        if not seconds > 0 or not self._predicted:
            return None
        self._latest.append(seconds)
        self._count += 1
        return median(self._latest) if self._count == _ENOUGH else None
