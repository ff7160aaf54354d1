"""Breakdown of each process's time into computing, waiting and the rest, from the step events of a run.

A step event has the share of the pipeline's run time in which each process computed, and the seconds for which the
receiver at each boundary waited. The event does not name the receivers. They follow from the number of boundaries with
traffic between N processes: N - 1 with one stage per process, 2N - 1 with two in a loop, 2N - 2 with two in a V (the
turn of the V lies within one process).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from thinpipe.core.events import LinkTraffic, Step
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.report.figures import BLUE, GREEN, GREY, ORANGE, legend, new_figure, time_unit
from thinpipe.report.summary import Summary


@dataclass
class TimeSpent:
    """Seconds of one process, summed over all steps."""

    computing: float = 0.0
    waiting: float = 0.0
    """Waiting for messages of other processes."""
    rest: float = 0.0
    """The rest of the steps: optimiser, data loading, the all-reduce at the end of each step."""

    @property
    def total(self) -> float:
        return self.computing + self.waiting + self.rest


def time_spent(steps: Sequence[Step], names: Sequence[Sequence[str]]) -> dict[str, TimeSpent]:
    """Time by process name, in pipeline order. `names`: process names of each step; a step with a wrong number of names
    uses "process 0" and so on."""
    spent: dict[str, TimeSpent] = {}
    for step, known in zip(steps, names, strict=True):
        count = max(1, len(step.busy))
        named = known if len(known) == count else [f"process {index}" for index in range(count)]
        for name, seconds in zip(named, _of_step(step), strict=True):
            mine = spent.setdefault(name, TimeSpent())
            mine.computing += seconds.computing
            mine.waiting += seconds.waiting
            mine.rest += seconds.rest
    return spent


def _of_step(step: Step) -> list[TimeSpent]:
    if not step.busy or not step.links:
        return [TimeSpent(computing=step.seconds)]
    waited = [0.0] * len(step.busy)
    receivers = _receivers(step)
    for link in step.links:
        waited[receivers[link.boundary][link.forward]] += link.waited_s
    longest = min(step.seconds, max(map(_pass_seconds, step.links)))
    spent = []
    for busy, wait in zip(step.busy, waited, strict=True):
        whole = min(step.seconds, wait / (1 - busy) if wait and busy < 1 else longest)
        wait = min(wait, whole)
        spent.append(TimeSpent(computing=whole - wait, waiting=wait, rest=step.seconds - whole))
    return spent


def _pass_seconds(link: LinkTraffic) -> float:
    """Seconds of the pipeline's run in the slowest process, over which `mbps` is averaged."""
    return link.nbytes * 8e-6 / link.mbps if link.mbps else 0.0


def _receivers(step: Step) -> dict[int, tuple[int, int]]:
    """For each boundary: (process that receives gradients, process that receives states)."""
    boundaries, count = sorted({link.boundary for link in step.links}), len(step.busy)
    if len(boundaries) == 2 * count - 2 and count > 1:  # V schedule: stages go down the processes and up again
        down = [(index, index + 1) for index in range(count - 1)]
        return dict(zip(boundaries, [*down, *((right, left) for left, right in reversed(down))], strict=True))
    return {boundary: (stage % count, (stage + 1) % count) for stage, boundary in enumerate(boundaries)}


if TYPE_CHECKING:
    from matplotlib.figure import Figure


def time_figure(spent: Mapping[str, TimeSpent], overhead_s: float) -> "Figure":
    """Bar chart per process. `overhead_s`: seconds of validation and checkpoints, the same for all processes."""
    names = list(spent)
    figure, axes = new_figure(1.1 + 0.34 * len(names))
    longest = max(each.total for each in spent.values()) + overhead_s
    unit, length = time_unit(longest)
    parts = (
        ("computing", BLUE, [spent[name].computing for name in names]),
        ("waiting for messages", ORANGE, [spent[name].waiting for name in names]),
        ("rest of the steps", GREY, [spent[name].rest for name in names]),
        ("validating and saving", GREEN, [overhead_s] * len(names)),
    )
    left = [0.0] * len(names)
    for label, colour, seconds in parts:
        lengths = [each / length for each in seconds]
        if any(lengths):
            axes.barh(names, lengths, left=left, color=colour, label=label, height=0.62)
        left = [start + width for start, width in zip(left, lengths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=unit)
    legend(axes, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return figure


def peers_by_step(summary: Summary) -> list[list[str]]:
    """Peer names of each step of `summary.steps`, in pipeline order; empty where the log names no peers."""
    names, by_event = list[str](), dict[int, list[str]]()
    for event in summary.events:
        if isinstance(event, GenerationStarted):
            names = [peer.name for peer in event.peers]
        elif isinstance(event, Step):
            by_event[id(event)] = names
    return [by_event.get(id(step), []) for step in summary.steps]
