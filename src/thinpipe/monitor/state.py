"""State of a run, folded from its events. Uses neither the clock nor files: the same events give the same snapshot."""

import math
import tomllib
from collections import deque
from collections.abc import Sequence

from thinpipe.core.audit_events import AuditEvent, BoundaryAlarm, CommitMeasured, LayersUnchanged, LossRecomputed
from thinpipe.core.event_text import format_event, format_event_line
from thinpipe.core.events import AnyEvent, Started, Step, Stopped, Validated
from thinpipe.core.exactness import Exactness
from thinpipe.core.hub_events import (
    CommitsOverdue,
    CommitsResumed,
    GenerationEnded,
    GenerationStarted,
    PeerAssignment,
    PeerJoined,
    PeerLeft,
)
from thinpipe.core.units import format_duration_ceil
from thinpipe.monitor.headline import limit_text, now_text, whose
from thinpipe.monitor.rolling_stats import RollingStats
from thinpipe.monitor.snapshot import Note, Recovery, Snapshot, StageStatus

_NOTES, _RECOVERIES, _ALARMS = 100, 50, 5
_MIN_STALE_SECONDS, _STALE_STEPS = 30.0, 10


class RunState:
    """Pass every event of a run to `on_event`, in log order; `snapshot` returns the state after them."""

    def __init__(self, run: str) -> None:
        self.run, self.state = run, "waiting"
        self.last_event_s: float | None = None
        self.steps, self.parameters, self.generation, self.dim = 0, 0, 0, 0
        self.last: Step | None = None
        self.rolling_stats = RollingStats()
        self.curve, self.validations = DownsampledCurve(), DownsampledCurve()
        self._segments: list[list[int]] = []
        self._peers: list[PeerAssignment] = []
        self._present: dict[str, None] = {}
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._recoveries: deque[Recovery] = deque(maxlen=_RECOVERIES)
        self._exactness = Exactness()
        self._commit_alarm, self._promised, self._planned = "", "", 0.0
        """`_promised`, `_planned`: slowest part and speed of the generation by the hub's measurements."""
        self.recomputed, self.commit_losses = DownsampledCurve(), DownsampledCurve()
        self._audit = self._who_reads = ""
        self._alarms: deque[str] = deque(maxlen=_ALARMS)
        self._interrupted_by: GenerationEnded | None = None
        """End of the last generation, until a step is finished again."""

    def on_event(self, event: AnyEvent) -> None:
        self.last_event_s = event.time_s
        self._exactness.on_event(event)
        match event:
            case Step():
                self._stepped(event)
                return
            case Started():
                self._started(event)
            case GenerationStarted():
                self.state, self.generation, self._peers = "running", event.generation, event.peers
                self._promised, self._planned = printable(event.bottleneck), event.planned_tokens_per_second
                self._present |= dict.fromkeys(peer.name for peer in event.peers)
                self.rolling_stats, self._who_reads = RollingStats(), printable(event.who_reads)
            case PeerJoined():
                self._present[event.peer] = None
            case PeerLeft() if self.state != "finished":  # peers that leave a finished run are not lost
                self._present.pop(event.peer, None)
            case GenerationEnded() if event.interrupts and self.state != "finished":
                self._interrupted_by, self.state = event, "recovering"
            case CommitsOverdue():
                self._commit_alarm = printable(format_event(event))
            case CommitsResumed():
                self._commit_alarm = ""
            case Validated():
                if event.loss is not None:
                    self.validations.add(event.step, event.loss)
            case LossRecomputed() | CommitMeasured() | LayersUnchanged() | BoundaryAlarm():
                self._audited(event)
            case Stopped():
                self.state = "finished" if event.reason == "finished" else f"stopped: {printable(event.reason)}"
            case _:
                pass
        kind = str(event.__struct_config__.tag)
        self._notes.append(Note(time_s=event.time_s, step=event.step, kind=kind, text=printable(format_event(event))))

    def _audited(self, event: AuditEvent) -> None:
        if isinstance(event, LossRecomputed):
            self._audit = printable(format_event_line(event))
            if math.isfinite(event.recomputed):
                self.recomputed.add(event.step, event.recomputed)
        elif isinstance(event, CommitMeasured) and math.isfinite(event.loss):
            self.commit_losses.add(event.step, event.loss)
        if event.is_disputed:
            self._alarms.append(printable(format_event_line(event)))

    def _started(self, event: Started) -> None:
        self.state, self.parameters, self.dim, self._segments = "running", event.parameters, event.dim, event.segments
        self.rolling_stats = RollingStats()
        try:
            self.steps = int(tomllib.loads(event.config).get("training", {}).get("steps", 0))
        except (tomllib.TOMLDecodeError, AttributeError, TypeError, ValueError):  # from a peer or another version
            self.steps = 0

    def _stepped(self, event: Step) -> None:
        self.state = "running"
        if self._interrupted_by is not None and self.last is not None:
            lost = max(0, self.last.step + 1 - event.step)
            seconds = event.time_s - self._interrupted_by.time_s
            reason = printable(self._interrupted_by.reason)
            self._recoveries.append(Recovery(step=self.last.step, seconds=seconds, lost_steps=lost, reason=reason))
            again = f", {lost} step(s) computed again" if lost else ""
            text = f"training continues after {format_duration_ceil(seconds)}{again}"
            self._notes.append(Note(time_s=event.time_s, step=event.step, kind="recovered", text=text))
        self._interrupted_by, self.last = None, event
        self.curve.add(event.step, event.loss)
        self.rolling_stats.add(event)

    def snapshot(self) -> Snapshot:
        last, rolling_stats, bubble = self.last, self.rolling_stats, self.rolling_stats.bubble
        stages = self._stages()
        slowest = max(stages, key=lambda stage: stage.busy or 0.0, default=None)
        each = rolling_stats.seconds_per_step
        on, traffic = whose(stages, has_hub=bool(self._peers)), rolling_stats.boundary_traffic
        going = each is not None and last is not None and self.steps > 0 and self.state == "running"
        return Snapshot(
            run=self.run,
            state=self.state,
            now=now_text(
                self.state,
                on=on,
                step=0 if last is None else last.step,
                steps=self.steps,
                has_stepped=rolling_stats.tokens_per_second is not None,
                interruption=printable(self._interrupted_by.reason) if self._interrupted_by is not None else "",
            ),
            limit=limit_text(stages, traffic, self._promised),
            planned_tokens_per_second=self._planned or None,
            last_event_s=self.last_event_s,
            stale_after_s=max(_MIN_STALE_SECONDS, _STALE_STEPS * (each or 0.0)),
            step=0 if last is None else last.step,
            steps=self.steps,
            tokens=0 if last is None else last.tokens,
            loss=None if last is None else last.loss,
            tokens_per_second=rolling_stats.tokens_per_second,
            eta_s=(self.steps - last.step) * each if going and last is not None and each is not None else None,
            parameters=self.parameters,
            generation=self.generation,
            compression=rolling_stats.compression(self.dim),
            bubble=bubble,
            slowest=slowest.name if slowest is not None and bubble is not None else "",
            stages=stages,
            boundary_traffic=traffic,
            standbys=[printable(name) for name in self._present if name not in {peer.name for peer in self._peers}],
            curve=self.curve.points,
            validations=self.validations.points,
            recomputed=self.recomputed.points,
            commit_losses=self.commit_losses.points,
            audit=self._audit,
            alarms=list(self._alarms),
            recoveries=list(self._recoveries),
            exactness=printable(self._exactness.in_words()),
            who_reads=self._who_reads,
            commit_alarm=self._commit_alarm,
            notes=list(self._notes),
        )

    def _stages(self) -> list[StageStatus]:
        busy, memory = self.rolling_stats.busy, self.rolling_stats.memory
        count = len(self._peers) or len(self._segments) or len(busy) or len(memory)
        peers = self._peers or [
            PeerAssignment(
                name=f"process {index}", segments=self._segments[index] if index < len(self._segments) else []
            )
            for index in range(count)
        ]
        stages = [
            StageStatus(
                name=printable(peer.name),
                segments=segments,
                busy=busy[index] if index < len(busy) else None,
                memory_nbytes=memory[index] if index < len(memory) else None,
                is_connected=not self._peers or peer.name in self._present,
                device=printable(peer.device),
                up_bps=peer.up_bps,
                down_bps=peer.down_bps,
                latency_s=peer.latency_s,
            )
            for index, peer in enumerate(peers)
            for segments in _contiguous(peer.segments)
        ]
        return sorted(stages, key=lambda stage: stage.segments[:1])


def _contiguous(segments: Sequence[int]) -> list[list[int]]:
    """Splits segment indices into consecutive runs: schedules with several stages per process leave gaps."""
    parts: list[list[int]] = [[]]
    for segment in sorted(segments):
        if parts[-1] and segment != parts[-1][-1] + 1:
            parts.append([])
        parts[-1].append(segment)
    return parts


def printable(text: str) -> str:
    """Replaces control characters (peers choose some of these texts) and truncates to 500 characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:500])


_Point = tuple[int, float, int]


class DownsampledCurve:
    """Curve over steps with at most `max_points` points: when full, neighbours are averaged in pairs."""

    def __init__(self, max_points: int = 400) -> None:
        self._max_points, self._steps_per_point = max_points, 1
        self._points: list[_Point] = []
        """Last step, mean value, and number of values of each point."""

    def add(self, step: int, value: float) -> None:
        """Appends a value. A step that is computed again replaces the points from that step on."""
        while self._points and self._points[-1][0] >= step:
            self._points.pop()
        if self._points and self._points[-1][2] < self._steps_per_point:
            self._points.append(_mean([self._points.pop(), (step, value, 1)]))
        else:
            self._points.append((step, value, 1))
        if len(self._points) > self._max_points:
            self._steps_per_point *= 2
            self._points = [_mean(self._points[at : at + 2]) for at in range(0, len(self._points), 2)]

    @property
    def points(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value, _ in self._points]


def _mean(points: Sequence[_Point]) -> _Point:
    count = sum(number for _, _, number in points)
    return points[-1][0], sum(value * number for _, value, number in points) / count, count
