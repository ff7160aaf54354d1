"""Events in, a picture out: what is to be seen of a run follows from its log alone. Knows neither clocks nor files."""

import tomllib
from collections import deque
from collections.abc import Iterable, Sequence

from thinpipe.core.event_words import in_words
from thinpipe.core.events import (
    AnyEvent,
    Arrived,
    Assembled,
    Departed,
    PeerPlace,
    Started,
    Step,
    Stopped,
    Validated,
)
from thinpipe.core.units import say_duration
from thinpipe.live.curve import Curve
from thinpipe.live.lately import Lately
from thinpipe.live.picture import Note, Picture, Recovery, Seat

_NOTES, _RECOVERIES = 100, 50
_LEAST_QUIET_SECONDS, _QUIET_STEPS = 30.0, 10


class Story:
    """`tell` it every event of a run, in order; `picture` is how the run stands then."""

    def __init__(self, run: str) -> None:
        self.run, self.state = run, "waiting"
        self.heard_s: float | None = None
        self.steps, self.parameters, self.epoch, self.dim = 0, 0, 0, 0
        self.last: Step | None = None
        self.lately = Lately()
        self.curve, self.validations = Curve(), Curve()
        self._segments: list[list[int]] = []
        self._peers: list[PeerPlace] = []
        self._present: dict[str, None] = {}
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._recoveries: deque[Recovery] = deque(maxlen=_RECOVERIES)
        self._broken: Departed | None = None
        """It ended the epoch, and no step was finished since."""

    def tell(self, event: AnyEvent) -> None:
        self.heard_s = event.time_s
        match event:
            case Step():
                self._stepped(event)
                return
            case Started():
                self._started(event)
            case Assembled():
                self.state, self.epoch, self._peers = "running", event.epoch, event.peers
                self._present |= dict.fromkeys(peer.name for peer in event.peers)
                self.lately = Lately()
            case Arrived():
                self._present[event.peer] = None
            case Departed():
                self._departed(event)
            case Validated():
                if event.loss is not None:
                    self.validations.add(event.step, event.loss)
            case Stopped():
                self.state = "finished" if event.reason == "finished" else f"stopped: {plain(event.reason)}"
            case _:
                pass
        kind = str(event.__struct_config__.tag)
        self._notes.append(Note(time_s=event.time_s, step=event.step, kind=kind, text=plain(in_words(event))))

    def _started(self, event: Started) -> None:
        self.state, self.parameters, self.dim, self._segments = "running", event.parameters, event.dim, event.segments
        self.lately = Lately()
        try:
            self.steps = int(tomllib.loads(event.config).get("training", {}).get("steps", 0))
        except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError):  # a peer's text, or of another version
            self.steps = 0

    def _departed(self, event: Departed) -> None:
        if self.state == "finished":  # who goes home then is not missed
            return
        self._present.pop(event.peer, None)
        if event.epoch:
            self._broken, self.state = event, "recovering"

    def _stepped(self, event: Step) -> None:
        self.state = "running"
        if self._broken is not None and self.last is not None:
            lost = max(0, self.last.step + 1 - event.step)
            seconds = event.time_s - self._broken.time_s
            reason = plain(self._broken.reason)
            self._recoveries.append(Recovery(step=self.last.step, seconds=seconds, lost_steps=lost, reason=reason))
            again = f", {lost} step(s) computed again" if lost else ""
            text = f"goes on after {say_duration(seconds)}{again}"
            self._notes.append(Note(time_s=event.time_s, step=event.step, kind="recovered", text=text))
        self._broken, self.last = None, event
        self.curve.add(event.step, event.loss)
        self.lately.add(event)

    def picture(self) -> Picture:
        last, lately, bubble = self.last, self.lately, self.lately.bubble
        seats = self._seats()
        slowest = max(seats, key=lambda seat: seat.busy or 0.0, default=None)
        each = lately.seconds_per_step
        going = each is not None and last is not None and self.steps > 0 and self.state == "running"
        return Picture(
            run=self.run,
            state=self.state,
            heard_s=self.heard_s,
            quiet_after_s=max(_LEAST_QUIET_SECONDS, _QUIET_STEPS * (each or 0.0)),
            step=0 if last is None else last.step,
            steps=self.steps,
            tokens=0 if last is None else last.tokens,
            loss=None if last is None else last.loss,
            tokens_per_second=lately.tokens_per_second,
            eta_s=(self.steps - last.step) * each if going and last is not None and each is not None else None,
            parameters=self.parameters,
            epoch=self.epoch,
            compression=lately.compression(self.dim),
            bubble=bubble,
            slowest=slowest.name if slowest is not None and bubble is not None else "",
            seats=seats,
            crossings=lately.crossings,
            spares=[plain(name) for name in self._present if name not in {peer.name for peer in self._peers}],
            curve=self.curve.points,
            validations=self.validations.points,
            recoveries=list(self._recoveries),
            notes=list(self._notes),
        )

    def _seats(self) -> list[Seat]:
        busy, memory = self.lately.busy, self.lately.memory
        count = len(self._peers) or len(self._segments) or len(busy) or len(memory)
        peers = self._peers or [
            PeerPlace(name=f"process {index}", segments=self._segments[index] if index < len(self._segments) else [])
            for index in range(count)
        ]
        seats = [
            Seat(
                name=plain(peer.name),
                segments=segments,
                busy=busy[index] if index < len(busy) else None,
                memory_nbytes=memory[index] if index < len(memory) else None,
                here=not self._peers or peer.name in self._present,
                device=plain(peer.device),
                up_bps=peer.up_bps,
                down_bps=peer.down_bps,
                latency_s=peer.latency_s,
            )
            for index, peer in enumerate(peers)
            for segments in _in_a_row(peer.segments)
        ]
        return sorted(seats, key=lambda seat: seat.segments[:1])


def tell_all(run: str, events: Iterable[AnyEvent]) -> Picture:
    story = Story(run)
    for event in events:
        story.tell(event)
    return story.picture()


def _in_a_row(segments: Sequence[int]) -> list[list[int]]:
    """Parts without gaps: some schedules give a process segments from two places."""
    parts: list[list[int]] = [[]]
    for segment in sorted(segments):
        if parts[-1] and segment != parts[-1][-1] + 1:
            parts.append([])
        parts[-1].append(segment)
    return parts


def plain(text: str) -> str:
    """Peers choose some of these words: nothing in them moves a cursor or rings a bell."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:500])
