"""What follows from a step whose values are bad: it is computed again, a process is accused, or the step is skipped.

Pure, and called with the same faults in every process, so that all do the same. A hub follows the steps of its peers
with it. A faulty attempt changes no state, so that computing the step again is exact.
"""

from typing import Literal

from thinpipe.training.faults import Fault

MAX_CONSECUTIVE_SKIPS = 3
"""Number of skipped steps in a row after which training stops with reason "not_finite"."""

Verdict = Literal["good", "retry", "accuse", "skip"]


class Attempts:
    """Attempts at one step after the other."""

    def __init__(self) -> None:
        self.skips = 0
        """Number of consecutive skipped steps up to now."""
        self._senders: set[int] = set()
        """Processes that were at fault in earlier attempts at this step."""

    def judge(self, fault: Fault | None, *, may_accuse: bool) -> Verdict:
        """What follows from an attempt. The step is computed again until one process is at fault for the second time.

        That process is accused if its values crossed a boundary and `may_accuse`; otherwise the step is skipped. Nobody
        is accused right after a skipped step: the weights have not changed since, and diverged weights produce bad
        values in every process.
        """
        if fault is None:
            self._senders, self.skips = set(), 0
            return "good"
        if fault.sender not in self._senders:
            self._senders.add(fault.sender)
            return "retry"
        self._senders = set()
        if fault.boundary is not None and not self.skips and may_accuse:
            return "accuse"
        self.skips += 1
        return "skip"
