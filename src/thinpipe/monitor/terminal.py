"""Renders a snapshot for a terminal, with stages in a row, the loss as a sparkline and recent events; and as plain
lines for a pipe."""

import math
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thinpipe.core.events import AnyEvent
from thinpipe.core.units import format_bytes, format_duration_ceil
from thinpipe.monitor.log_follower import LogFollower
from thinpipe.monitor.snapshot import BoundaryTraffic, Snapshot, StageStatus

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTES = 8


def render(snapshot: Snapshot, now_s: float, *, width: int = 100) -> RenderableType:
    parts: list[RenderableType] = [_head(snapshot, now_s), *map(Text, headlines(snapshot)), _figures(snapshot)]
    if snapshot.curve:
        line = sparkline([loss for _, loss in snapshot.curve], max(10, width - 30))
        parts.append(Text.assemble(("loss ", "dim"), line, f" {snapshot.loss or 0.0:.4f}", no_wrap=True))
    if snapshot.stages:
        parts += _rows(snapshot, width)
    if snapshot.commit_alarm:
        parts.append(Text(snapshot.commit_alarm, "bold red"))
    if snapshot.exactness:
        parts.append(Text(f"numbers: {snapshot.exactness}", "dim"))
    if snapshot.who_reads:
        parts.append(Text(snapshot.who_reads, "dim"))
    if snapshot.audit:
        parts.append(Text(f"audit: {snapshot.audit}", "dim"))
    parts += [Text(alarm, "bold red") for alarm in snapshot.alarms]
    if snapshot.standbys:
        parts.append(Text(f"standby: {', '.join(snapshot.standbys)}", "dim"))
    for note in snapshot.notes[-_NOTES:]:
        clock = time.strftime("%H:%M:%S", time.localtime(note.time_s))
        parts.append(Text.assemble((f"{clock}  {note.step:>6}  ", "dim"), note.text, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def headlines(snapshot: Snapshot) -> Iterable[str]:
    """What happens now and on whose machines, at what speed against plan, and what limits it."""
    yield f"now: {snapshot.now}"
    if snapshot.tokens_per_second is not None:
        speed, planned = f"speed: {snapshot.tokens_per_second:,.0f} tokens/s", snapshot.planned_tokens_per_second
        yield speed + (f", {snapshot.tokens_per_second / planned:.0%} of {planned:,.0f} planned" if planned else "")
    if snapshot.limit:
        yield f"what limits it: {snapshot.limit}"


def plain_lines(snapshot: Snapshot, now_s: float) -> Iterable[str]:
    """The same as `render`, a line for each thing, without columns, colours or block characters."""
    yield _head(snapshot, now_s).plain
    yield from headlines(snapshot)
    yield from figures(snapshot)
    if snapshot.loss is not None:
        yield f"loss {snapshot.loss:.4f}"
    yield from (f"validation loss {loss:.4f} at step {step:,}" for step, loss in snapshot.validations[-1:])
    between = {traffic.boundary: traffic for traffic in snapshot.boundary_traffic}
    for stage in snapshot.stages:
        cells = [cell.plain for cell in _stage_cells(stage)]
        yield ", ".join(filter(None, cells)) + ("" if stage.is_connected else ", not connected")
        if traffic := between.get(max(stage.segments, default=-1)):
            yield f"  boundary {traffic.boundary}: " + ", ".join(cell.plain for cell in _traffic_cells(traffic))
    yield from filter(None, (snapshot.commit_alarm, *snapshot.alarms))
    for name, text in (("numbers", snapshot.exactness), ("audit", snapshot.audit)):
        if text:
            yield f"{name}: {text}"
    yield from filter(None, (snapshot.who_reads,))
    if snapshot.standbys:
        yield f"standby: {', '.join(snapshot.standbys)}"
    for note in snapshot.notes[-_NOTES:]:
        yield f"{time.strftime('%H:%M:%S', time.localtime(note.time_s))} step {note.step}: {note.text}"


def _head(snapshot: Snapshot, now_s: float) -> Text:
    silent = now_s - snapshot.last_event_s if snapshot.last_event_s is not None else 0.0
    state, style = snapshot.state, {"running": "green", "finished": "blue"}.get(snapshot.state, "yellow")
    if snapshot.last_event_s is None:
        state = "waiting for the first event"
    elif snapshot.state == "running" and silent > snapshot.stale_after_s:
        state, style = f"no event for {format_duration_ceil(silent)}", "yellow"
    return Text.assemble((snapshot.run, "bold"), "  ", (state, style))


def _figures(snapshot: Snapshot) -> Text:
    return Text("  ·  ".join(figures(snapshot)), overflow="fold")


def figures(snapshot: Snapshot) -> Iterable[str]:
    """Short descriptions of the figures that are known."""
    if snapshot.steps:
        yield f"step {snapshot.step:,} of {snapshot.steps:,}"
    if snapshot.eta_s is not None and math.isfinite(snapshot.eta_s):
        yield f"{format_duration_ceil(snapshot.eta_s)} left"
    if snapshot.compression is not None:
        yield f"{snapshot.compression:.1f} times fewer bytes than dense bf16"
    if snapshot.bubble is not None:
        yield f"bubble {snapshot.bubble:.0%}, slowest: {snapshot.slowest}"
    if snapshot.generation:
        yield f"generation {snapshot.generation}, {len(snapshot.recoveries)} recoveries"


def _rows(snapshot: Snapshot, width: int) -> Iterable[Table]:
    """Tables with a column for each stage and for the boundary after it, wrapped to `width`."""
    between = {traffic.boundary: traffic for traffic in snapshot.boundary_traffic}
    columns: list[Sequence[Text]] = []
    for stage in snapshot.stages:
        traffic = between.get(max(stage.segments, default=-1))
        columns += [_stage_cells(stage)] if traffic is None else [_stage_cells(stage), _traffic_cells(traffic)]
    widest = max(text.cell_len for column in columns for text in column)
    per_row = max(1, width // (widest + 2))
    for first in range(0, len(columns), per_row):
        table = Table.grid(padding=(0, 2))
        for cells in zip(*columns[first : first + per_row], strict=True):
            table.add_row(*cells)
        yield table


def _stage_cells(stage: StageStatus) -> Sequence[Text]:
    segments = f"segment {_span(stage.segments)}" if stage.segments else ""
    return (
        Text(stage.name, "bold" if stage.is_connected else "red strike"),
        Text(segments, "dim"),
        Text("" if stage.memory_nbytes is None else format_bytes(stage.memory_nbytes)),
        Text("" if stage.busy is None else f"waits {1 - stage.busy:.0%}"),
    )


def _traffic_cells(traffic: BoundaryTraffic) -> Sequence[Text]:
    return (
        Text(f"{traffic.forward_mbps:.2f} Mbps →", "cyan"),
        Text(f"← {traffic.back_mbps:.2f} Mbps", "cyan"),
        Text(f"{traffic.nbytes_per_token:,.0f} B/token", "dim"),
        Text(f"waited {traffic.waited:.0%}", "dim"),
    )


def _span(segments: Sequence[int]) -> str:
    whole = list(segments) == list(range(segments[0], segments[-1] + 1))
    if len(segments) == 1 or not whole:
        return ", ".join(map(str, segments))
    return f"{segments[0]}-{segments[-1]}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Bar characters scaled from the lowest to the highest value; averages values if there are more than `width`."""
    count = min(width, len(values))
    if not count:
        return ""
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)


class LiveTable:
    """Live view in the terminal. `show` takes every event and may be called from any thread; a background thread
    redraws twice a second."""

    def __init__(self, console: Console, run: Path) -> None:
        follower = LogFollower(run)
        follower.poll()  # events logged before this start
        self._run_state, self._lock = follower.run_state, threading.Lock()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=2)

    def _render(self) -> RenderableType:
        with self._lock:
            return render(self._run_state.snapshot(), time.time(), width=self._live.console.width)

    def show(self, event: AnyEvent, text: str = "") -> None:  # noqa: ARG002
        """The view has its own texts."""
        with self._lock:
            self._run_state.on_event(event)

    def say(self, text: str) -> None:
        """Prints a line above the view."""
        self._live.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def working(self, text: str) -> None:
        """Nothing: the view says by itself since when nothing has happened."""

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()
