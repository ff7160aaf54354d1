"""Watches whether commits come, and says what is true now of the work that can be lost. Pure: the caller has the clock.

Work since the newest commit is lost if the hub and the peers fail now. Its time is counted from the end of the commit's
step, or from the beginning of the generation, which computes what came before again. Commits are overdue when training
has gone on for three intervals without one, over as many generations as it took.
"""

from collections import deque

from thinpipe.core.hub_events import CommitsOverdue, CommitsResumed
from thinpipe.core.units import format_duration_ceil
from thinpipe.swarm.hub.commits.interval import MIN_SECONDS

INTERVALS = 3
"""Intervals without a commit after which commits are overdue."""
_REMEMBERED_STEPS = 10_000


class CommitWatchdog:
    """`committed`: step of the newest commit."""

    def __init__(self, committed: int) -> None:
        self._committed = committed
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_STEPS)
        """Steps of the generation, and when each was finished."""
        self._since: float | None = None
        """From when on work can be lost; None: no generation is running."""
        self._counted_from: float | None = None
        """From when on `_seconds` has not been counted yet; None: nobody trains."""
        self._seconds = 0.0
        """Seconds of training since the newest commit, up to `_counted_from`."""
        self._startup_seconds = 0.0
        self._barked_at = 0.0
        """Seconds without a commit when commits were last said to be overdue; 0: they are not."""
        self._comes_again = False
        """True: a commit has come after commits were overdue, and `check` has not said so yet."""

    @property
    def is_overdue(self) -> bool:
        return self._barked_at > 0

    def begin(self, now: float, startup_seconds: float) -> None:
        """A generation begins; it may take `startup_seconds` until its first step is finished."""
        self.end(now)
        self._since, self._startup_seconds = now, startup_seconds

    def end(self, now: float) -> None:
        """The generation is over: what it has not committed is computed again."""
        self._count(now)
        self._since = self._counted_from = None
        self._steps.clear()

    def on_step(self, now: float, step: int) -> None:
        if self._since is not None:
            self._steps.append((step, now))
            self._count(now)

    def on_commit(self, step: int, announced: float) -> None:
        """`announced`: when all peers had announced this step, and so had computed it."""
        self._committed, self._seconds = step, 0.0
        self._comes_again, self._barked_at = self._comes_again or self.is_overdue, 0.0
        ended = min([announced, *(time for number, time in self._steps if number == step)])
        if self._since is not None:
            self._since = max(self._since, ended)
            self._counted_from = self._since

    def work_at_risk(self, now: float) -> float:
        """Seconds of work that are lost if all fails now."""
        return 0.0 if self._since is None else now - self._since

    def check(self, now: float, interval_seconds: float, owed: str) -> CommitsOverdue | CommitsResumed | None:
        """`interval_seconds`: between two commits, as planned. `owed`: what the next commit waits for. Returns the
        event, if commits have become overdue, have been for twice as long as last said, or come again."""
        if self._since is not None and self._counted_from is None and now - self._since > self._startup_seconds:
            self._counted_from = self._since + self._startup_seconds
        seconds = self._seconds + (0.0 if self._counted_from is None else now - self._counted_from)
        if seconds > max(INTERVALS * max(interval_seconds, MIN_SECONDS), 2 * self._barked_at):
            self._barked_at = seconds
            return CommitsOverdue(step=self._committed, seconds=seconds, reason=owed)
        if self._comes_again:
            self._comes_again = False
            return CommitsResumed(step=self._committed)
        return None

    def in_words(self, now: float, plan: str, owed: str) -> str:
        """What holds now. `plan`: how often commits should come, in words; `owed`: as of `check`."""
        lost = f"at most {format_duration_ceil(self.work_at_risk(now))} of work can be lost now"
        if self.is_overdue:
            return f"NO COMMIT since step {self._committed} ({owed}): {lost}, and more every moment"
        if self._since is None:
            return plan
        return f"{plan}; newest: step {self._committed}; {lost}"

    def _count(self, now: float) -> None:
        if self._counted_from is not None:
            self._seconds += now - self._counted_from
        if self._since is not None:
            self._counted_from = now
