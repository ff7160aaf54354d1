"""Helper threads for transfers: a timer, and a watcher that waits for works one after the other.

Both are daemon threads: a message that never arrives must not keep a crashed process alive.
"""

import heapq
import itertools
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol


class Timer:
    """Thread that runs actions at given times, ties in the order of `at` calls. Actions must not block or raise."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="thinpipe-timer", daemon=True)
        self._thread.start()

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Schedules an action at a time of the monotonic clock."""
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._order), action))
            if self._due[0][2] is action:
                self._changed.notify()

    def close(self, *, until: float) -> None:
        """Runs the actions due by `until`, drops later ones, and joins the thread."""
        with self._changed:
            self._due = [entry for entry in self._due if entry[0] <= until]
            heapq.heapify(self._due)
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            action()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            while True:
                now = time.monotonic()
                if self._due and self._due[0][0] <= now:
                    return heapq.heappop(self._due)[2]
                if self._closed and not self._due:
                    return None
                self._changed.wait(self._due[0][0] - now if self._due else None)


class Waitable(Protocol):
    """A c10d work, or another transfer in flight. `wait` may take the limit of time that the watcher was given."""

    @property
    def wait(self) -> Callable[..., object]: ...


class Watcher:
    """Thread that waits for works in FIFO order and calls back with None or the error when each has ended."""

    def __init__(self, name: str, *, timeout: timedelta | None = None) -> None:
        """`timeout`: limit for each work; None: the default of its group."""
        self._queue: _Watched = queue.SimpleQueue()
        arguments = (self._queue, () if timeout is None else (timeout,))
        self._thread = threading.Thread(target=_watch, args=arguments, name=f"thinpipe-{name}", daemon=True)
        self._thread.start()

    def watch(self, work: Waitable, ended: Callable[[Exception | None], None]) -> None:
        """Enqueues a work; `ended` is called in the watcher thread."""
        self._queue.put((work, ended))

    def close(self) -> None:
        """Lets the thread exit after the works enqueued so far; does not wait."""
        self._queue.put(None)

    def join(self, seconds: float) -> bool:
        """Waits up to `seconds` for the thread; returns True if it has exited."""
        self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def __del__(self) -> None:
        self.close()


_Watched = queue.SimpleQueue[tuple[Waitable, Callable[[Exception | None], None]] | None]


def _watch(watched: _Watched, timeout: tuple[()] | tuple[timedelta]) -> None:
    """Thread body. Holds no reference to finished works (their tensors) or to the Watcher, so both can be freed."""
    while (entry := watched.get()) is not None:
        work, ended = entry
        try:
            work.wait(*timeout)
        except Exception as error:
            ended(error)
        else:
            ended(None)
        del entry, work, ended
