"""A picture of a run as text, for a terminal or a pipe: segments in a row, the loss as a line of blocks, the news."""

import math
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from thinpipe.core.units import format_bytes, say_duration
from thinpipe.live.picture import Crossing, Picture, Seat

_BLOCKS = "▁▂▃▄▅▆▇█"
_NOTES = 8


def render(picture: Picture, now_s: float, *, width: int = 100) -> RenderableType:
    parts: list[RenderableType] = [_head(picture, now_s), _figures(picture)]
    if picture.curve:
        line = sparkline([loss for _, loss in picture.curve], max(10, width - 30))
        parts.append(Text.assemble(("loss ", "dim"), line, f" {picture.loss or 0.0:.4f}", no_wrap=True))
    if picture.seats:
        parts += _rows(picture, width)
    if picture.spares:
        parts.append(Text(f"spare: {', '.join(picture.spares)}", "dim"))
    for note in picture.notes[-_NOTES:]:
        clock = time.strftime("%H:%M:%S", time.localtime(note.time_s))
        parts.append(Text.assemble((f"{clock}  {note.step:>6}  ", "dim"), note.text, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _head(picture: Picture, now_s: float) -> Text:
    silent = now_s - picture.heard_s if picture.heard_s is not None else 0.0
    state, style = picture.state, {"running": "green", "finished": "blue"}.get(picture.state, "yellow")
    if picture.heard_s is None:
        state = "waiting: nothing is in the log yet"
    elif picture.state == "running" and silent > picture.quiet_after_s:
        state, style = f"nothing heard for {say_duration(silent)}", "yellow"
    return Text.assemble((picture.run, "bold"), "  ", (state, style))


def _figures(picture: Picture) -> Text:
    return Text("  ·  ".join(figures(picture)), overflow="fold")


def figures(picture: Picture) -> Iterable[str]:
    """What is known, a few words each."""
    if picture.steps:
        yield f"step {picture.step:,} of {picture.steps:,}"
    if picture.tokens_per_second is not None:
        yield f"{picture.tokens_per_second:,.0f} tokens/s"
    if picture.eta_s is not None and math.isfinite(picture.eta_s):
        yield f"{say_duration(picture.eta_s)} left"
    if picture.compression is not None:
        yield f"{picture.compression:.1f} times fewer bytes than dense bf16"
    if picture.bubble is not None:
        yield f"{picture.bubble:.0%} of the time is waiting, slowest: {picture.slowest}"
    if picture.epoch:
        yield f"epoch {picture.epoch}, {len(picture.recoveries)} recoveries"


def _rows(picture: Picture, width: int) -> Iterable[Table]:
    """A column for each seat and each boundary after it, as many side by side as there is room for."""
    between = {crossing.boundary: crossing for crossing in picture.crossings}
    columns: list[Sequence[Text]] = []
    for seat in picture.seats:
        crossing = between.get(max(seat.segments, default=-1))
        columns += [_seat(seat)] if crossing is None else [_seat(seat), _crossing(crossing)]
    widest = max(text.cell_len for column in columns for text in column)
    most = max(1, width // (widest + 2))
    for first in range(0, len(columns), most):
        table = Table.grid(padding=(0, 2))
        for cells in zip(*columns[first : first + most], strict=True):
            table.add_row(*cells)
        yield table


def _seat(seat: Seat) -> Sequence[Text]:
    segments = f"segment {_span(seat.segments)}" if seat.segments else ""
    return (
        Text(seat.name, "bold" if seat.here else "red strike"),
        Text(segments, "dim"),
        Text("" if seat.memory_nbytes is None else format_bytes(seat.memory_nbytes)),
        Text("" if seat.busy is None else f"waits {1 - seat.busy:.0%}"),
    )


def _crossing(crossing: Crossing) -> Sequence[Text]:
    return (
        Text(f"{crossing.forward_mbps:.2f} Mbps →", "cyan"),
        Text(f"← {crossing.back_mbps:.2f} Mbps", "cyan"),
        Text(f"{crossing.nbytes_per_token:,.0f} B/token", "dim"),
        Text(f"waited {crossing.waited:.0%}", "dim"),
    )


def _span(segments: Sequence[int]) -> str:
    whole = list(segments) == list(range(segments[0], segments[-1] + 1))
    if len(segments) == 1 or not whole:
        return ", ".join(map(str, segments))
    return f"{segments[0]}-{segments[-1]}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The lowest is the lowest block; where there are more values than letters, their means."""
    count = min(width, len(values))
    if not count:
        return ""
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((mean - low) * scale)] for mean in means)
