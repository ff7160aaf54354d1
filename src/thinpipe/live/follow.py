"""Follows the event log of a run: before it exists, while it grows, when the run was begun anew in the same folder."""

from pathlib import Path

import msgspec

from thinpipe.core.events import AnyEvent
from thinpipe.core.tail import Tail
from thinpipe.live.state import Story

LOOK_SECONDS = 0.5
_EVENTS: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class Following:
    """`look` reads what is new; `story` is what the log has told so far."""

    def __init__(self, folder: Path) -> None:
        self.path, self._run = folder / "events.jsonl", folder.resolve().name
        self.story = Story(self._run)
        self._tail = Tail(self.path, whole=True)
        self.unknown = 0
        """Lines that this version does not know."""

    def look(self) -> list[AnyEvent]:
        """What is new; lines that a crash cut short, or that another version wrote, are passed over."""
        lines = self._tail.lines()
        if self._tail.restarted:
            self.story, self.unknown = Story(self._run), 0
        events = [event for line in lines if (event := self._read(line)) is not None]
        for event in events:
            self.story.tell(event)
        return events

    def _read(self, line: bytes) -> AnyEvent | None:
        try:
            return _EVENTS.decode(line)
        except msgspec.ValidationError:
            self.unknown += 1
            return None
        except msgspec.DecodeError:
            return None
