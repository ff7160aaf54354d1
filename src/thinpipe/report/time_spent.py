"""Where the time of each process went, from what the steps of a run say of it.

A step's log says what share of the pass through the pipeline each process computed, and how long the receiver of each
link waited. Which process receives over a link follows from how many boundaries are crossed: N processes that have one
stage each cross N - 1, two each in a loop 2N - 1, and two each in a V 2N - 2, for the turn of the V is in one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.core.events import LinkUse, Step


@dataclass
class TimeSpent:
    """Seconds of one process in all steps."""

    computing: float = 0.0
    waiting: float = 0.0
    """For messages of other processes."""
    rest: float = 0.0
    """Of the steps: optimiser, data, the exchange at the end of each."""

    @property
    def total(self) -> float:
        return self.computing + self.waiting + self.rest


def time_spent(steps: Sequence[Step], names: Sequence[Sequence[str]]) -> dict[str, TimeSpent]:
    """By process, in order. `names`: those of each step's processes; too few: "process 0" and so on."""
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


def _pass_seconds(link: LinkUse) -> float:
    """Of the slowest process: rates are averages over its pass."""
    return link.nbytes * 8e-6 / link.mbps if link.mbps else 0.0


def _receivers(step: Step) -> dict[int, tuple[int, int]]:
    """Of each boundary: who receives gradients, who receives states."""
    boundaries, count = sorted({link.boundary for link in step.links}), len(step.busy)
    if len(boundaries) == 2 * count - 2 and count > 1:  # a V: down, and up again
        down = [(index, index + 1) for index in range(count - 1)]
        return dict(zip(boundaries, [*down, *((right, left) for left, right in reversed(down))], strict=True))
    return {boundary: (stage % count, (stage + 1) % count) for stage, boundary in enumerate(boundaries)}
