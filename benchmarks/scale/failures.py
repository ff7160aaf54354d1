"""What is left of a pipeline's work when its peers fail: commits that take long to send, against lives that end.

A run goes back to the newest commit that is whole at the hub. Without failures nothing is lost: state is sent while
training goes on.
"""

import math
from dataclasses import dataclass

from thinpipe.swarm.hub.commits.interval import MARGIN, MIN_SECONDS

NOTICE_S = 3.1
"""Seconds until work goes on with a standby, in the median of 104 outages (docs/concepts/fault-model.md)."""


@dataclass(frozen=True)
class Commits:
    send_s: float
    """Until the slowest part of one is at the hub."""
    fetch_s: float
    """Until who takes a place has its state."""

    @property
    def interval_s(self) -> float:
        """As `swarm/hub/commits/interval.py` chooses it."""
        return max(MARGIN * self.send_s, MIN_SECONDS)


def kept_share(commits: Commits, *, peers: int, lifetime_s: float) -> float:
    """Of the time, what goes into work that is kept, in the mean over lives that end at random.

    Undisturbed times T are exponential. One of them keeps an interval for every n with T > send + n interval.
    """
    rate = peers / lifetime_s
    kept = commits.interval_s * math.exp(-rate * commits.send_s) / math.expm1(rate * commits.interval_s)
    return kept / (1 / rate + NOTICE_S + commits.fetch_s)
