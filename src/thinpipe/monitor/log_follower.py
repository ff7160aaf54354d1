"""Follows the event log of a run: waits for it to exist, reads it as it grows, and starts over if it is replaced."""

import logging
from pathlib import Path

import msgspec

from thinpipe.core.events import AnyEvent
from thinpipe.core.log_tail import Tail
from thinpipe.core.run_folder import events_path
from thinpipe.monitor.state import RunState

_LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.5
_EVENTS: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class LogFollower:
    """`poll` reads new events; `run_state` is the state after all events read so far."""

    def __init__(self, folder: Path) -> None:
        self.path, self._run = events_path(folder), folder.resolve().name
        self.run_state = RunState(self._run)
        self._tail = Tail(self.path, whole=True)
        self.unknown = 0
        """Number of lines that are no events known to this version."""

    def poll(self) -> list[AnyEvent]:
        """New events since the last call. Lines truncated by a crash or written by another version are skipped."""
        lines = self._tail.lines()
        if self._tail.restarted:
            self.run_state, self.unknown = RunState(self._run), 0
        events = [event for line in lines if (event := self._read(line)) is not None]
        for event in events:
            self.run_state.on_event(event)
        return events

    def _read(self, line: bytes) -> AnyEvent | None:
        try:
            return _EVENTS.decode(line)
        except msgspec.ValidationError:
            self.unknown += 1
            return None
        except (msgspec.DecodeError, UnicodeDecodeError):  # truncated or damaged
            _LOG.info("%s: skipped a damaged line of %d bytes", self.path, len(line))
            return None
