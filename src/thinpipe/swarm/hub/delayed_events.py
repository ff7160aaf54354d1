"""Event log of a hub on a disk that may be full: events that cannot be written wait in memory, within a byte budget."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from thinpipe.core.events import AnyEvent, EventLog

MAX_DELAYED_NBYTES = 16 << 20
"""Maximum number of bytes, as encoded JSON, of the events that wait for disk space."""


class DelayedEvents:
    """Writes events to the log in order. Events that a full disk keeps out of the log are written with a later event or
    by `close`; beyond `max_nbytes` the oldest of these events are dropped.

    `report` is called with a message for the hub's owner: once when the log can no longer be written, and once with the
    number of dropped events when the log can be written again or is closed.
    """

    def __init__(self, path: Path, report: Callable[[str], None], *, max_nbytes: int = MAX_DELAYED_NBYTES) -> None:
        self.log = EventLog(path)
        self._report, self._max_nbytes = report, max_nbytes
        self._lines: deque[bytes] = deque()
        """Encoded events that are not in the log yet, oldest first."""
        self._nbytes, self._n_dropped, self._is_failing = 0, 0, False

    def write(self, event: AnyEvent) -> None:
        """Writes the delayed events and this one, or delays the event. Does not raise OSError."""
        line = msgspec.json.encode(event)
        self._lines.append(line)
        self._nbytes += len(line)
        problem = self._flush()
        if problem is not None and not self._is_failing:
            reason = problem.strerror or problem
            self._report(f"the event log cannot be written ({reason}): free disk space at the hub")
        self._is_failing = problem is not None
        while self._nbytes > self._max_nbytes:
            self._nbytes -= len(self._lines.popleft())
            self._n_dropped += 1
        if not self._is_failing:
            self._report_dropped()

    def close(self) -> None:
        """Writes the delayed events, if there is disk space now, and closes the log."""
        if self._flush() is not None:
            self._n_dropped += len(self._lines)
        self._report_dropped()
        self.log.close()

    def _flush(self) -> OSError | None:
        """Writes the delayed events; returns the error if the disk is still full."""
        try:
            while self._lines:
                self.log.write_line(self._lines[0])
                self._nbytes -= len(self._lines.popleft())
        except OSError as error:
            return error
        return None

    def _report_dropped(self) -> None:
        if self._n_dropped:
            self._report(f"{self._n_dropped} event(s) are missing in the event log, because the disk was full")
        self._n_dropped = 0
