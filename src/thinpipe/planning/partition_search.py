"""Feasibility test of `partition.py`: can segments be placed so that no resource exceeds a given time per token?

Links are full duplex. A middle stage sends and receives both states and gradients; the first stage only sends states
(and the labels of models whose messages have no token ids) and receives gradients, and the last stage only the reverse.
So a slow link costs less at either end of the pipeline.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf

from thinpipe.config.model_family import AttentionKernel

_BEAM_WIDTH = 128
"""Machine sets kept per set size. Up to 9 machines there are at most 126 sets of a size, so all are kept."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Capabilities of a machine, as a peer measured them."""

    name: str
    flops: float
    """FLOP/s of matrix products like the model's."""
    memory_nbytes: int
    """Bytes that a run may use."""
    host_memory_nbytes: float | None = None
    """Bytes of the host's memory that a run may use for what is offloaded; None: the device computes in the host's
    memory, and nothing is offloaded."""
    up_bps: float
    down_bps: float
    device_class: str = ""
    """Class of the device (`core.exactness`); empty: unknown."""
    attention: AttentionKernel = "fused"
    """Kernel of the model's attention on this machine."""
    excluded: frozenset[int] = frozenset()
    """Segments that the machine must not compute."""


@dataclass(frozen=True, kw_only=True)
class SegmentNeeds:
    """Requirements of one segment."""

    flops_per_token: float
    """Floating-point operations per token, forward and backward."""
    memory_nbytes: int
    """Bytes of the device, with fused attention."""
    attention_nbytes: Mapping[AttentionKernel, int] = field(default_factory=dict)
    """Bytes of the device with other kernels of attention, if they differ."""
    host_nbytes: int = 0
    """Bytes of the host, if the device has memory of its own; else the device needs them too."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Payload of one boundary, in bytes per token."""

    forward_nbytes: float
    backward_nbytes: float
    labels_nbytes: float = 0.0
    """Labels, from the first machine to the last one."""

    @property
    def bits(self) -> float:
        """Bits per token over a boundary, both directions."""
        return 8 * (self.forward_nbytes + self.backward_nbytes)

    def relayed_bits(self, machines: int) -> float:
        """Bits per token between all machines of a pipeline."""
        return (machines - 1) * self.bits + 8 * self.labels_nbytes * (machines > 1)


PlacedStage = tuple[Machine, range]


def link_loads(traffic: Traffic, *, first: bool, last: bool) -> tuple[float, float]:
    """Bits per token that a machine sends and receives at this position of the pipeline."""
    forward, backward = 8 * traffic.forward_nbytes, 8 * traffic.backward_nbytes
    up = (0 if last else forward) + (0 if first else backward)
    down = (0 if first else forward) + (0 if last else backward)
    labels = 8 * traffic.labels_nbytes
    return up + labels * (first and not last), down + labels * (last and not first)


def find_partition(
    seconds: float,
    needs: Sequence[SegmentNeeds],
    machines: Sequence[Machine],
    traffic: Traffic,
    *,
    hub_bps: float,
    shared_nbytes: int,
    max_machines: int | None = None,
) -> list[PlacedStage] | None:
    """Partition with the fewest machines that takes at most `seconds` per token; None if none was found.

    Dynamic programming over sets of machines, from the last segment backwards: for each set, the order that leaves the
    fewest segments (leaving fewer is never worse). Beyond `_BEAM_WIDTH` sets of a size it is a beam search; exact for
    up to 9 machines.
    """
    reach = [_reach(seconds, needs, machine, shared_nbytes) for machine in machines]
    fits = [_fitting_roles(seconds, machine, traffic) for machine in machines]
    whole = len(needs)
    sets: dict[int, Order] = {0: (whole, ())}
    for count in range(1, min(len(machines), max_machines or len(machines)) + 1):
        if hub_bps * seconds < traffic.relayed_bits(count):
            return None
        grown: dict[int, Order] = {}
        for members, (left, order) in sorted(sets.items(), key=lambda item: item[1][0])[:_BEAM_WIDTH]:
            for index in range(len(machines)):
                start = reach[index][left]
                if start == 0 and (True, left == whole) not in fits[index]:
                    start = 1  # too slow a link for labels, perhaps: another machine has to be the first
                if members >> index & 1 or start == left or (start == 0, left == whole) not in fits[index]:
                    continue
                if start == 0:
                    return _reconstruct((*order, index), reach, machines, whole)
                more = members | 1 << index
                if more not in grown or start < grown[more][0]:
                    grown[more] = (start, (*order, index))
        sets = grown
    return None


Order = tuple[int, tuple[int, ...]]
"""Number of segments not yet placed, and indices of the machines that hold the others, last stage first."""


def _reach(seconds: float, needs: Sequence[SegmentNeeds], machine: Machine, shared_nbytes: int) -> list[int]:
    """For every number n of unplaced segments: the first segment of the longest run of segments up to n that the
    machine may compute, can compute within `seconds` and can hold in memory; n itself if not even one fits."""
    flops = list(accumulate((need.flops_per_token for need in needs), initial=0.0))
    memory = list(accumulate((needed_nbytes(need, machine) for need in needs), initial=0))
    host = list(accumulate((need.host_nbytes for need in needs), initial=0))
    free_nbytes, free_host = machine.memory_nbytes - shared_nbytes, _free_host(machine)
    if free_nbytes < 0:
        return list(range(len(needs) + 1))
    allowed_from = [0]
    """For every n: the first segment of the longest run up to n that the machine may compute."""
    for segment in range(len(needs)):
        allowed_from.append(segment + 1 if segment in machine.excluded else allowed_from[-1])
    return [
        max(
            bisect_left(flops, flops[left] - machine.flops * seconds),
            bisect_left(memory, memory[left] - free_nbytes),
            bisect_left(host, host[left] - free_host),
            allowed_from[left],
        )
        for left in range(len(needs) + 1)
    ]


def needed_nbytes(need: SegmentNeeds, machine: Machine) -> int:
    """Bytes of a machine's device that a segment takes."""
    on_device = need.attention_nbytes.get(machine.attention, need.memory_nbytes)
    return on_device + (need.host_nbytes if machine.host_memory_nbytes is None else 0)


def _free_host(machine: Machine) -> float:
    return inf if machine.host_memory_nbytes is None else machine.host_memory_nbytes


def _fitting_roles(seconds: float, machine: Machine, traffic: Traffic) -> set[tuple[bool, bool]]:
    """Positions (is first, is last) in the pipeline for which the machine's link is fast enough. A machine that is both
    first and last needs no link."""
    roles = set()
    for first in (False, True):
        for last in (False, True):
            up, down = link_loads(traffic, first=first, last=last)
            if up <= machine.up_bps * seconds and down <= machine.down_bps * seconds:
                roles.add((first, last))
    return roles


def _reconstruct(
    order: Sequence[int], reach: Sequence[Sequence[int]], machines: Sequence[Machine], whole: int
) -> list[PlacedStage]:
    stages: list[PlacedStage] = []
    left = whole
    for number, index in enumerate(order, start=1):
        start = reach[index][left] if number == len(order) else max(1, reach[index][left])
        stages.insert(0, (machines[index], range(start, left)))
        left = start
    return stages


def spread_over_all(
    needs: Sequence[SegmentNeeds], machines: Sequence[Machine], *, shared_nbytes: int
) -> list[PlacedStage] | None:
    """Partition over all these machines (at most one per segment, from the start of the list) that minimises the
    slowest machine's compute time. The first machine gets the last segments, if it may compute the last one. None if
    memory does not suffice."""
    chosen = _with_ends_allowed(list(reversed(machines[: len(needs)])), len(needs))
    flops = list(accumulate((need.flops_per_token for need in needs), initial=0.0))
    host = list(accumulate((need.host_nbytes for need in needs), initial=0))
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for machine in chosen:
        memory = list(accumulate((needed_nbytes(need, machine) for need in needs), initial=0))
        further: dict[int, tuple[float, list[int]]] = {}
        for start, (slowest, ends) in best.items():
            for stop in range(start + 1, len(needs) + 1):
                too_large = memory[stop] - memory[start] + shared_nbytes > machine.memory_nbytes
                too_large = too_large or host[stop] - host[start] > _free_host(machine)
                if too_large or stop - 1 in machine.excluded:
                    break
                seconds = max(slowest, (flops[stop] - flops[start]) / machine.flops)
                if stop not in further or seconds < further[stop][0]:
                    further[stop] = seconds, [*ends, stop]
        best = further
    if len(needs) not in best:
        return None
    _, ends = best[len(needs)]
    return [(machine, range(*edges)) for machine, edges in zip(chosen, pairwise(ends), strict=True)]


def _with_ends_allowed(machines: Sequence[Machine], segments: int) -> Sequence[Machine]:
    """The machines in this order, but with one that may compute the first segment at its front and another one that may
    compute the last segment at its end, if there are such."""
    first = next((machine for machine in machines if 0 not in machine.excluded), None)
    able = [machine for machine in machines if machine is not first and segments - 1 not in machine.excluded]
    if first is None or not able:
        return machines
    return [first, *(machine for machine in machines if machine not in (first, able[-1])), able[-1]]
