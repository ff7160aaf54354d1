"""Means over the last few steps: one step alone jumps too much to be read."""

from collections import deque
from itertools import groupby
from statistics import fmean

from thinpipe.core.events import LinkUse, Step
from thinpipe.live.picture import Crossing
from thinpipe.report.traffic import traffic_of

_STEPS = 20


class Lately:
    """Of steps that the same processes computed."""

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
        """With all that happens between two steps: validation, checkpoints."""
        if len(self._steps) < 2:
            return self._steps[0].seconds if self._steps else None
        return max(0.0, self._steps[-1].time_s - self._steps[0].time_s) / (len(self._steps) - 1)

    @property
    def busy(self) -> list[float]:
        count = len(self._steps[-1].busy) if self._steps else 0
        same = [step.busy for step in self._steps if len(step.busy) == count]
        return [fmean(shares) for shares in zip(*same, strict=True)]

    @property
    def bubble(self) -> float | None:
        return 1 - fmean(self.busy) if self.busy else None

    @property
    def memory(self) -> list[int]:
        return self._steps[-1].memory if self._steps else []

    def compression(self, dim: int) -> float | None:
        """Against `dim` numbers a token in bfloat16 over the same boundaries, states and gradients."""
        if not self._steps:
            return None
        traffic = traffic_of(self._steps, dim=dim, tokens_per_step=self._tokens / len(self._steps))
        return traffic.ratio if traffic.sent_nbytes and traffic.dense_nbytes else None

    @property
    def crossings(self) -> list[Crossing]:
        links = sorted((link for step in self._steps for link in step.links), key=lambda link: link.boundary)
        return [self._crossing(boundary, list(of)) for boundary, of in groupby(links, lambda link: link.boundary)]

    def _crossing(self, boundary: int, links: list[LinkUse]) -> Crossing:
        ways = [[link for link in links if link.forward is forward] for forward in (True, False)]
        seconds, tokens = sum(step.seconds for step in self._steps), self._tokens
        return Crossing(
            boundary=boundary,
            forward_mbps=fmean(link.mbps for link in ways[0]) if ways[0] else 0.0,
            back_mbps=fmean(link.mbps for link in ways[1]) if ways[1] else 0.0,
            nbytes_per_token=sum(link.nbytes for link in links) / tokens if tokens else 0.0,
            waited=max(sum(link.waited_s for link in way) for way in ways) / seconds if seconds > 0 else 0.0,
        )
