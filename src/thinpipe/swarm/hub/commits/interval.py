"""Commit interval and upload rates, from state sizes, link rates and step time. Pure.

A commit is safe when the hub has all of its state, and the next one should not begin before that. The interval is
therefore the smallest number of steps in which the slowest peer can upload its part, with a margin. Uploads get the
fraction `share` of every peer's uplink and of the hub's downlink, which all peers use at once; the messages of the
pipeline get the rest.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from thinpipe.core.units import format_duration_ceil

MARGIN = 1.5
"""Factor on the upload time, since links are not always as fast as they were measured."""
MIN_SECONDS = 10.0
"""Minimum time between two commits, in seconds, however small the state: each commit pauses training while the state is
written to disk."""
_LATE, _MIN_LATE_SECONDS = 4.0, 60.0
"""An upload is late after `_LATE` times the time that it should take, and not before `_MIN_LATE_SECONDS`."""
ALONE_SECONDS = 1200.0
"""Upload time, in seconds, up to which a single peer can lengthen the interval for all, whatever it says of its uplink.
Beyond, the interval is what the slowest of the others needs, and commits come as the slow peer's files arrive."""
_MIN_SAMPLES = 5
"""Number of measured steps from which the step time is known."""


@dataclass(frozen=True, kw_only=True)
class CommitPlan:
    """How often a generation commits, and how fast its peers upload."""

    interval: int
    """Steps between two commits; the same for all peers of a generation."""
    bytes_per_second: tuple[float, ...]
    """Upload rate limit of each peer, in bytes per second, in pipeline order."""
    send_seconds: float
    """Seconds until the slowest upload has arrived at the hub."""
    deadlines: tuple[float, ...] = ()
    """Seconds after which the upload of each peer is late, in pipeline order."""

    def seconds(self, step_seconds: float) -> float:
        """Seconds from one commit to the next, given the seconds per step."""
        return max(self.interval * step_seconds, self.send_seconds)

    def in_words(self, step_seconds: float) -> str:
        """The interval, given the seconds per step. No promise: what can be lost depends on the commits that come."""
        steps = "step" if self.interval == 1 else f"{self.interval} steps"
        return f"a commit every {steps}, about every {format_duration_ceil(self.seconds(step_seconds))}"


def plan_commits(
    *,
    state_nbytes: Sequence[float],
    up_bps: Sequence[float],
    hub_down_bps: float,
    share: float,
    step_seconds: float,
    max_steps: int,
    interval: int | None = None,
) -> CommitPlan:
    """Chooses the interval and the upload rates. `state_nbytes` and `up_bps` (bits per second) are per peer. `interval`
    overrides the computed number of steps, which is at most `max_steps`."""
    rates = upload_rates(state_nbytes, up_bps, hub_down_bps, share)
    seconds = [nbytes / rate for nbytes, rate in zip(state_nbytes, rates, strict=True)]
    uploads = sorted(seconds)
    send_seconds = uploads[-1]
    if interval is None:
        others = uploads[-2] if len(uploads) > 1 else send_seconds
        steps = max(MARGIN * min(send_seconds, max(others, ALONE_SECONDS)), MIN_SECONDS) / step_seconds
        interval = max(1, math.ceil(min(max_steps, steps)))
    deadlines = tuple(max(_LATE * each, _MIN_LATE_SECONDS) for each in seconds)
    return CommitPlan(interval=interval, bytes_per_second=tuple(rates), send_seconds=send_seconds, deadlines=deadlines)


def upload_rates(
    state_nbytes: Sequence[float], up_bps: Sequence[float], hub_down_bps: float, share: float
) -> list[float]:
    """Upload rate of each peer in bytes per second. The hub's downlink is divided in proportion to the state sizes, so
    that all peers finish together."""
    total = sum(state_nbytes)
    return [share / 8 * min(up, hub_down_bps * nbytes / total) for nbytes, up in zip(state_nbytes, up_bps, strict=True)]


def predict_step_seconds(
    *, tokens: int, tokens_per_second: float, microbatches: int, peers: int, latency_s: float
) -> float:
    """Predicted seconds per step before any step was measured: the time of the slowest part with pipeline fill and
    drain, plus the latency of a message through all peers and back and of the step reduction."""
    fill = (microbatches + peers - 1) / microbatches
    return tokens / tokens_per_second * fill + (2 * (peers - 1) + 1) * latency_s


class StepTimeEstimator:
    """Seconds per step: a prediction, corrected by measurements of the previous generation."""

    def __init__(self) -> None:
        self._predicted, self._slowdown, self._count = 0.0, 1.0, 0
        self._latest = deque[float](maxlen=4 * _MIN_SAMPLES)
        self.first = 0.0
        """As `known`, but that of the first steps with which it was measured: it changes once in a generation."""

    @property
    def known(self) -> float:
        """Median of the latest steps of this generation; before there are enough of them, the corrected prediction."""
        return median(self._latest) if self._count >= _MIN_SAMPLES else self._predicted * self._slowdown

    def begin(self, predicted: float) -> float:
        """A generation begins. Returns its predicted seconds per step, scaled by the ratio of measured to predicted
        time of the previous generation."""
        if self._count >= _MIN_SAMPLES:
            self._slowdown = median(self._latest) / self._predicted
        self._predicted, self._count = predicted, 0
        self._latest.clear()
        self.first = self.known
        return self.first

    def add(self, seconds: float) -> None:
        """Adds a measured step."""
        if seconds > 0 and self._predicted:
            self._latest.append(seconds)
            self._count += 1
            if self._count == _MIN_SAMPLES:
                self.first = self.known
