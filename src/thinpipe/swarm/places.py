"""Whether segments can be placed so that no part of the pipeline takes longer than a given time for a token.

Lines carry both directions at once. A machine in the middle sends states on and gradients back and receives as many;
the first one sends states and receives gradients, the last one the other way round: a slow line hurts less at an end.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_MOST_SETS = 128
"""Of machines that are looked at further, for each size; all there are for up to 9 machines."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """As it was measured."""

    name: str
    flops: float
    """A second, of matrix products like the model's."""
    memory_nbytes: int
    """That a run may use."""
    up_bps: float
    down_bps: float


@dataclass(frozen=True, kw_only=True)
class Need:
    """Of one segment."""

    flops_per_token: float
    """Forward and backward."""
    memory_nbytes: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of one boundary, in bytes per token."""

    forward_nbytes: float
    backward_nbytes: float

    @property
    def bits(self) -> float:
        return 8 * (self.forward_nbytes + self.backward_nbytes)


Place = tuple[Machine, range]


def line_loads(traffic: Traffic, *, first: bool, last: bool) -> tuple[float, float]:
    """Bits per token that a machine at this place sends and receives."""
    forward, backward = 8 * traffic.forward_nbytes, 8 * traffic.backward_nbytes
    up = (0 if last else forward) + (0 if first else backward)
    down = (0 if first else forward) + (0 if last else backward)
    return up, down


def find_places(
    seconds: float,
    needs: Sequence[Need],
    machines: Sequence[Machine],
    traffic: Traffic,
    *,
    hub_bps: float,
    shared_nbytes: int,
    most: int | None = None,
) -> list[Place] | None:
    """With as few machines as can be; None if there is no way. Exact for up to 9 machines.

    From the last segment backwards: for every set of machines, how far they get in their best order. Getting further
    with the same machines is never worse, so nothing else has to be remembered.
    """
    reach = [_reach(seconds, needs, machine, shared_nbytes) for machine in machines]
    fits = [_fitting_roles(seconds, machine, traffic) for machine in machines]
    whole = len(needs)
    sets: dict[int, Order] = {0: (whole, ())}
    for count in range(1, min(len(machines), most or len(machines)) + 1):
        if hub_bps * seconds < (count - 1) * traffic.bits:
            return None
        grown: dict[int, Order] = {}
        for members, (left, order) in sorted(sets.items(), key=lambda item: item[1][0])[:_MOST_SETS]:
            for index in range(len(machines)):
                start = reach[index][left]
                if members >> index & 1 or start == left or (start == 0, left == whole) not in fits[index]:
                    continue
                if start == 0:
                    return _spell_out((*order, index), reach, machines, whole)
                more = members | 1 << index
                if more not in grown or start < grown[more][0]:
                    grown[more] = (start, (*order, index))
        sets = grown
    return None


Order = tuple[int, tuple[int, ...]]
"""Segments that are left, and the machines that have the others, the last first."""


def _reach(seconds: float, needs: Sequence[Need], machine: Machine, shared_nbytes: int) -> list[int]:
    """For every number of segments that are left: the first of those that the machine takes from their end."""
    flops = list(accumulate((need.flops_per_token for need in needs), initial=0.0))
    memory = list(accumulate((need.memory_nbytes for need in needs), initial=0))
    room = machine.memory_nbytes - shared_nbytes
    if room < 0:
        return list(range(len(needs) + 1))
    return [
        max(bisect_left(flops, flops[left] - machine.flops * seconds), bisect_left(memory, memory[left] - room))
        for left in range(len(needs) + 1)
    ]


def _fitting_roles(seconds: float, machine: Machine, traffic: Traffic) -> set[tuple[bool, bool]]:
    """(is first, is last) of the places in the pipeline for which its line is fast enough. A machine that is both
    needs no line."""
    roles = set()
    for first in (False, True):
        for last in (False, True):
            up, down = line_loads(traffic, first=first, last=last)
            if up <= machine.up_bps * seconds and down <= machine.down_bps * seconds:
                roles.add((first, last))
    return roles


def _spell_out(
    order: Sequence[int], reach: Sequence[Sequence[int]], machines: Sequence[Machine], whole: int
) -> list[Place]:
    places: list[Place] = []
    left = whole
    for index in order:
        start = reach[index][left]
        places.insert(0, (machines[index], range(start, left)))
        left = start
    return places


def spread(needs: Sequence[Need], machines: Sequence[Machine], *, shared_nbytes: int) -> list[Place] | None:
    """Something for each of these machines, or for as many of the first as there are segments, so that the slowest is
    as fast as can be; the first of them has the last segments. None if they cannot hold it so."""
    chosen = list(reversed(machines[: len(needs)]))
    flops = list(accumulate((need.flops_per_token for need in needs), initial=0.0))
    memory = list(accumulate((need.memory_nbytes for need in needs), initial=0))
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for machine in chosen:
        further: dict[int, tuple[float, list[int]]] = {}
        for start, (slowest, ends) in best.items():
            for stop in range(start + 1, len(needs) + 1):
                if memory[stop] - memory[start] + shared_nbytes > machine.memory_nbytes:
                    break
                seconds = max(slowest, (flops[stop] - flops[start]) / machine.flops)
                if stop not in further or seconds < further[stop][0]:
                    further[stop] = seconds, [*ends, stop]
        best = further
    if len(needs) not in best:
        return None
    _, ends = best[len(needs)]
    return [(machine, range(*edges)) for machine, edges in zip(chosen, pairwise(ends), strict=True)]
