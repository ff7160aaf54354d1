"""Draws a chaos run: steps over time with every fault, outage and commit. Needs matplotlib (the extra `report`)."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.chaos.attacks.catalogue import ATTACKER, ATTACKS
from benchmarks.chaos.log import AnyRecord, Begun, Committed, Happened, Struck
from benchmarks.chaos.outages import find_outages
from benchmarks.links.figure import COLOURS, DENSE_COLOUR, new_figure
from thinpipe.core.events import Step

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = {
    "kill": ("x", "#c0392b", "SIGKILL of a peer"),
    "stop": ("s", COLOURS[0], "SIGSTOP, 5 to 60 s"),
    "cut": ("d", COLOURS[1], "link cut in both directions"),
    "deaf": ("v", COLOURS[1], "link cut, nothing in"),
    "mute": ("^", COLOURS[1], "link cut, nothing out"),
    "hub": ("X", "#000000", "SIGKILL of the hub"),
    "second_hub": ("P", "#888888", "a second hub"),
    "store": ("D", COLOURS[3], "a layer of the commit lost"),
    "disk": ("o", COLOURS[3], "disk full"),
    "poison": (".", COLOURS[2], "a bad message"),
    ATTACKER: ("*", "#7d3c98", "an attack of the hostile member"),
}
"""Also for all attacks as one."""
_OUTAGE_COLOUR = "#f6d5d0"


def draw(runs: Sequence[tuple[int, Sequence[AnyRecord]]], path: Path) -> None:
    """A panel for each seed."""
    figure = new_figure(13, 0.9 + 3.6 * len(runs))
    panels: Any = figure.subplots(len(runs), 1, squeeze=False)
    used: dict[str, Any] = {}
    for axes, (seed, records) in zip(panels[:, 0], runs, strict=True):
        used |= _draw_run(axes, records)
        axes.set_title(f"seed {seed}", fontsize=10, loc="left")
    panels[-1][0].set_xlabel("minutes")
    names = [name for name in ("steps", "nothing computed", "commit", *MARKS) if name in used]
    labels = [MARKS[name][2] if name in MARKS else name for name in names]
    figure.legend(
        [used[name] for name in names], labels, frameon=False, ncols=7, loc="outside lower center", fontsize=8
    )
    figure.suptitle("Steps over time while peers, links and the hub fail, and a member attacks", fontsize=11)
    figure.savefig(path, dpi=150)


def _draw_run(axes: "Axes", records: Sequence[AnyRecord]) -> dict[str, Any]:
    """Returns one handle of each kind, for the legend."""
    clock = _Clock(records)
    # recorded after it happened: a step just before the first record after a break belongs to no earlier part
    steps = [(min(clock(r.event.time_s), r.clock_s / 60), r.event.step) for r in records if _is_step(r)]  # type: ignore[union-attr]
    if not steps:
        return {}
    used: dict[str, Any] = {}
    for outage in find_outages(records):
        used["nothing computed"] = axes.axvspan(
            clock(outage.began_s), clock(outage.again_s), color=_OUTAGE_COLOUR, linewidth=0
        )
    highest = max(step for _, step in steps)
    (used["steps"],) = axes.plot(*_with_gaps(steps), color=DENSE_COLOUR, linewidth=1.2)
    commits = [clock(r.time_s) for r in records if isinstance(r, Committed)]
    (used["commit"],) = axes.plot(
        commits, [highest * 0.02] * len(commits), "|", color=COLOURS[2], markersize=6, markeredgewidth=0.8
    )
    struck = [r for r in records if isinstance(r, Struck) and not r.skipped]
    present = [kind for kind in MARKS if any(_row(r) == kind for r in struck)]
    for row, kind in enumerate(present):
        moments = [clock(r.time_s) for r in struck if _row(r) == kind]
        mark, colour, _ = MARKS[kind]
        height = highest * (1.06 + 0.06 * row)
        (used[kind],) = axes.plot(moments, [height] * len(moments), mark, color=colour, markersize=6)
    axes.set_ylim(0, highest * (1.1 + 0.06 * len(present)))
    axes.set_xlim(0, max(moment for moment, _ in steps))
    axes.set_ylabel("step")
    axes.grid(color="#eeeeee", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return used


def _row(struck: Struck) -> str:
    return ATTACKER if struck.kind in ATTACKS else struck.kind


def _with_gaps(steps: Sequence[tuple[float, int]]) -> tuple[list[float], list[float]]:
    """Where a run went back there is no line."""
    minutes, numbers = [steps[0][0]], [float(steps[0][1])]
    for (_, before), (moment, number) in itertools.pairwise(steps):
        if number <= before:
            minutes.append(moment)
            numbers.append(math.nan)
        minutes.append(moment)
        numbers.append(number)
    return minutes, numbers


def _is_step(record: AnyRecord) -> bool:
    return isinstance(record, Happened) and isinstance(record.event, Step)


class _Clock:
    """Minutes of the run at a time since 1970, without its breaks."""

    def __init__(self, records: Sequence[AnyRecord]) -> None:
        self._begun = [(r.time_s, r.clock_s) for r in records if isinstance(r, Begun)]

    def __call__(self, time_s: float) -> float:
        began = [each for each in self._begun if each[0] <= time_s] or self._begun[:1]
        return (began[-1][1] + time_s - began[-1][0]) / 60
