"""Rolling means over the last `_STEPS` steps; single steps are too noisy to show."""

from collections import deque
from itertools import groupby
from statistics import fmean

from thinpipe.core.events import LinkTraffic, Step
from thinpipe.monitor.snapshot import BoundaryTraffic
from thinpipe.report.traffic import traffic_of

_STEPS = 20


class RollingStats:
    """Statistics of recent steps. Start a new object when the set of processes changes."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=_STEPS)

    def add(self, step: Step) -> None:
        self._steps.append(step)

    @property
    def tokens_per_second(self) -> float | None:
        seconds = sum(step.seconds for step in self._steps)
        return self._tokens / seconds if seconds > 0 else None

    @property
    def _tokens(self) -> float:
        return sum(step.tokens_per_second * step.seconds for step in self._steps)

    @property
    def seconds_per_step(self) -> float | None:
        """Mean wall-clock time per step, including validation and checkpoints between steps."""
        if len(self._steps) < 2:
            return self._steps[0].seconds if self._steps else None
        return max(0.0, self._steps[-1].time_s - self._steps[0].time_s) / (len(self._steps) - 1)

    @property
    def busy(self) -> list[float]:
        """Mean share of the time in which each process computed, 0 to 1."""
        count = len(self._steps[-1].busy) if self._steps else 0
        same = [step.busy for step in self._steps if len(step.busy) == count]
        return [fmean(shares) for shares in zip(*same, strict=True)]

    @property
    def bubble(self) -> float | None:
        """Mean share of the time in which processes did not compute."""
        return 1 - fmean(self.busy) if self.busy else None

    @property
    def memory(self) -> list[int]:
        """Peak memory of each process in bytes, as reported with the last step."""
        return self._steps[-1].memory if self._steps else []

    def compression(self, dim: int) -> float | None:
        """Ratio of dense bf16 traffic (`dim` numbers per token and direction, same boundaries) to what was sent."""
        if not self._steps:
            return None
        traffic = traffic_of(self._steps, dim=dim, tokens_per_step=self._tokens / len(self._steps))
        return traffic.ratio if traffic.sent_nbytes and traffic.dense_nbytes else None

    @property
    def boundary_traffic(self) -> list[BoundaryTraffic]:
        links = sorted((link for step in self._steps for link in step.links), key=lambda link: link.boundary)
        return [
            self._boundary_traffic(boundary, list(of)) for boundary, of in groupby(links, lambda link: link.boundary)
        ]

    def _boundary_traffic(self, boundary: int, links: list[LinkTraffic]) -> BoundaryTraffic:
        directions = [[link for link in links if link.forward is forward] for forward in (True, False)]
        seconds, tokens = sum(step.seconds for step in self._steps), self._tokens
        return BoundaryTraffic(
            boundary=boundary,
            forward_mbps=fmean(link.mbps for link in directions[0]) if directions[0] else 0.0,
            back_mbps=fmean(link.mbps for link in directions[1]) if directions[1] else 0.0,
            nbytes_per_token=sum(link.nbytes for link in links) / tokens if tokens else 0.0,
            waited=max(sum(link.waited_s for link in direction) for direction in directions) / seconds
            if seconds > 0
            else 0.0,
        )
