"""Draws the results of `python -m benchmarks.links`. Needs matplotlib (the extra `report`), imported only when asked
for."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.links.results import MethodRow, ScheduleRow, SweepRow
from benchmarks.links.workload import Run
from thinpipe.core.extras import require_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
DENSE_COLOUR = "#444444"
COLOURS = ("#e08e0b", "#0b6e99", "#5b8c3e", "#9a4c95")
"""One per subspace width; more widths than colours start over."""
BOX_ASPECT = 0.8
"""Height of a panel over its width: fixed, so that the angle of a line is known."""
TICKS = (1, 2, 5)
"""In every power of ten."""


def new_figure(width: float, height: float) -> "Figure":
    require_extra("matplotlib", extra="report", feature="a figure")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def draw_sweep(methods: Sequence[MethodRow], rows: Sequence[SweepRow], path: Path) -> None:
    """Tokens per second over the rate of the link, a panel for each round trip."""
    round_trips = list(dict.fromkeys(row.run.link.round_trip_ms for row in rows))
    figure = new_figure(1.0 + 6.2 * len(round_trips), 6.2)
    panels: Any = figure.subplots(1, len(round_trips), sharex=True, sharey=True, squeeze=False)
    colours = _colours([method.run for method in methods])
    for axes, round_trip in zip(panels[0], round_trips, strict=True):
        _set_scales(axes, methods, rows)
        for method in methods:
            own = [row for row in rows if row.run.link.round_trip_ms == round_trip and _same(row.run, method.run)]
            _draw_method(axes, method, own, colours[method.run])
        axes.set_title("no latency" if not round_trip else f"{round_trip:g} ms round trip", fontsize=11)
    panels[0][0].set_ylabel("tokens per second")
    shape = methods[0].run.shape
    figure.suptitle(
        f"Training speed over the link of every process: d={shape.dim}, {shape.stages} stages, "
        f"{shape.microbatches} micro-batches of {shape.sequences * shape.seq_len} tokens\n"
        "marks: measured.   thin lines: the bound, rising while the link limits, flat where the processor does",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def _set_scales(axes: "Axes", methods: Sequence[MethodRow], rows: Sequence[SweepRow]) -> None:
    fastest, slowest = max(method.compute_only for method in methods), min(row.measured for row in rows)
    bottom, top = slowest / 1.9, 1.5 * max(fastest, *(row.measured for row in rows))
    left = 0.75 * bottom * min(method.break_even_mbps / method.compute_only for method in methods)
    right = 1.3 * max(_rate(row) for row in rows)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_xticks(ticks := _ticks(left, right), [f"{tick:g}" for tick in ticks])
    axes.set_yticks(ticks := _ticks(bottom, top), [f"{tick:,.0f}" for tick in ticks])
    axes.minorticks_off()
    axes.set_box_aspect(BOX_ASPECT)
    axes.grid(color="#eeeeee", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("link of every process, Mbps up and down")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_method(axes: "Axes", method: MethodRow, rows: Sequence[SweepRow], colour: str) -> None:
    run, break_even, ceiling = method.run, method.break_even_mbps, method.compute_only
    left, right = axes.get_xlim()
    rounded = run.number_format == "int8"
    # Latency costs a little at both ends of a step only, so the bound of a link without it is drawn in both panels.
    bends = (min(left, break_even), break_even, right)
    bound = [ceiling * min(1.0, rate / break_even) for rate in bends]
    axes.plot(bends, bound, "--" if rounded else "-", color=colour, linewidth=0.7, alpha=0.6)
    rates, speeds = [_rate(row) for row in rows], [row.measured for row in rows]
    marks = "s--" if rounded else "o-"
    axes.plot(rates, speeds, marks, color=colour, markersize=5, linewidth=1.6, alpha=0.9)
    bottom, top = axes.get_ylim()
    low = bottom * 1.1
    axes.text(
        break_even * low / ceiling,
        low,
        f" {run.method} ",
        color=colour,
        fontsize=8.5,
        rotation=math.degrees(math.atan(BOX_ASPECT * math.log(right / left) / math.log(top / bottom))),
        rotation_mode="anchor",
        va="bottom" if rounded else "top",  # of two neighbours, the one to the left is the rounded one
    )


def _ticks(low: float, high: float) -> list[float]:
    powers = range(-3, 8)
    return [factor * 10.0**power for power in powers for factor in TICKS if low <= factor * 10.0**power <= high]


def _same(one: Run, other: Run) -> bool:
    """The same method, whatever the link."""
    return (one.width, one.number_format) == (other.width, other.number_format)


def draw_schedules(rows: Sequence[ScheduleRow], path: Path) -> None:
    """Speed and peak memory of every schedule, uncompressed beside compressed."""
    figure = new_figure(10, 4)
    speed, memory = figure.subplots(1, 2)
    kinds = list(dict.fromkeys(row.run.schedule_text for row in rows))
    methods = list(dict.fromkeys(row.run.method for row in rows))
    for index, method in enumerate(methods):
        own = [row for row in rows if row.run.method == method]
        width = 0.8 / len(methods)
        places = [kinds.index(row.run.schedule_text) - 0.4 + width * (index + 0.5) for row in own]
        colour = DENSE_COLOUR if own[0].run.width is None else COLOURS[2]
        speeds = [row.tokens_per_second for row in own]
        peaks = [max((each.peak_nbytes for each in row.memory), default=0) / MIB for row in own]
        for axes, values in ((speed, speeds), (memory, peaks)):
            bars = axes.bar(places, values, width * 0.92, color=colour, label=method)
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=9, padding=2)
    speed.set_ylabel("tokens per second")
    memory.set_ylabel("peak of the largest process, MiB")
    for axes in (speed, memory):
        axes.set_xticks(range(len(kinds)), [f"{kind} in flight" if "+" in kind else kind for kind in kinds])
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside lower center")
    figure.suptitle(f"Schedules at {rows[0].run.link.text} round trip", fontsize=11)
    figure.savefig(path, dpi=150)


def _colours(runs: Sequence[Run]) -> dict[Run, str]:
    widths = list(dict.fromkeys(run.width for run in runs if run.width is not None))
    return {run: DENSE_COLOUR if run.width is None else COLOURS[widths.index(run.width) % len(COLOURS)] for run in runs}


def _rate(row: SweepRow) -> float:
    assert row.run.link.mbps is not None
    return row.run.link.mbps
