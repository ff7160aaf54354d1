"""A transfer under way, as c10d sees it: it ends at a moment known in advance, with an error, or not in time."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist


class TimedWork(dist.Work):
    """Waiting ends at `settle`'s moment, or at once with `fail`'s error. `what` names the transfer in errors."""

    def __init__(self, what: str, *, timeout: timedelta) -> None:
        super().__init__()
        self._what, self._timeout = what, timeout
        self._done_at: float | None = None
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def settle(self, done_at: float) -> None:
        """The transfer ends at this moment of the monotonic clock."""
        with self._changed:
            self._done_at = done_at
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Too late to matter for a transfer that has ended."""
        with self._changed:
            if not self.is_completed():
                self._error = error
                self._changed.notify_all()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """No timeout given: the group's, counted from here. The group can be used after one has passed."""
        limit = timeout or self._timeout
        deadline = time.monotonic() + limit.total_seconds()
        with self._changed:
            while True:
                if self._error is not None:
                    raise dist.DistNetworkError(f"{self._what} failed: {self._error}") from self._error
                now = time.monotonic()
                if self._done_at is not None and now >= self._done_at:
                    return True
                if now >= deadline:
                    raise dist.DistNetworkError(f"{self._what} did not end within {limit.total_seconds():g} seconds")
                until = deadline if self._done_at is None else min(deadline, self._done_at)
                self._changed.wait(until - now)

    def is_completed(self) -> bool:
        return self._error is not None or (self._done_at is not None and time.monotonic() >= self._done_at)

    def is_success(self) -> bool:
        return self._error is None and self.is_completed()

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()


def finished_work() -> TimedWork:
    """Of what was over before it was returned."""
    work = TimedWork("a finished transfer", timeout=timedelta(0))
    work.settle(time.monotonic())
    return work
