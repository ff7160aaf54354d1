"""c10d Work of a pending transfer that completes at a given time, fails with an error, or times out."""

import threading
import time
from datetime import timedelta

import torch.distributed as dist


class TimedWork(dist.Work):
    """Work that completes at the time passed to `complete`, or fails at once with the error passed to `fail`.

    `what` names the transfer in error messages. Thread-safe.
    """

    def __init__(self, what: str, *, timeout: timedelta) -> None:
        super().__init__()
        self._what, self._timeout = what, timeout
        self._done_at: float | None = None
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def complete(self, done_at: float) -> None:
        """Sets the completion time, on the monotonic clock; it may be in the future."""
        with self._changed:
            self._done_at = done_at
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Fails the transfer with `error`; no effect once it has completed."""
        with self._changed:
            if not self.is_completed():
                self._error = error
                self._changed.notify_all()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for completion. Raises DistNetworkError on failure or after `timeout` (0: the timeout of the group).

        The group stays usable after a timeout.
        """
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
    """Work of an operation that has already completed."""
    work = TimedWork("a finished transfer", timeout=timedelta(0))
    work.complete(time.monotonic())
    return work
