"""Who computes which segments: a pure function of what machines can do and what segments need.

A pipeline is as fast as its slowest part: a machine's processor, its line, or the hub's line, through which everything
goes. The assignment makes the slowest part as fast as it can: it looks for the least time per token at which the
machines, the fastest first, can take all segments between them. Machines that are not needed are spares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes

_HALVINGS = 60


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


@dataclass(frozen=True, kw_only=True)
class Assignment:
    places: tuple[tuple[str, range], ...]
    """Machines in the order of the pipeline, with their segments."""
    spares: tuple[str, ...]
    tokens_per_second: float
    """If nobody ever waits: what the slowest part allows."""
    bottleneck: str
    """That part, in words."""


def assign(
    needs: Sequence[Need], machines: Sequence[Machine], traffic: Traffic, *, hub_up_bps: float, hub_down_bps: float
) -> Assignment:
    """Raises UserError, which says how much memory is missing, when the machines cannot hold the model."""
    ready = sorted(machines, key=lambda machine: (-machine.flops, machine.name))
    slowest = max(need.flops_per_token for need in needs) / min(machine.flops for machine in ready)
    limit = slowest * len(needs) + len(ready) * traffic.bits / min(
        hub_up_bps, hub_down_bps, *(min(machine.up_bps, machine.down_bps) for machine in ready)
    )
    hub_bps = min(hub_up_bps, hub_down_bps)
    found = _within(limit, needs, ready, traffic, hub_bps)
    if found is None:
        raise UserError(_what_is_missing(needs, ready))
    low, high = 0.0, limit
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        better = _within(middle, needs, ready, traffic, hub_bps)
        if better is None:
            low = middle
        else:
            found, high = better, middle
    return _describe(found, needs, ready, traffic, hub_bps)


Places = list[tuple[Machine, range]]


def _within(
    seconds: float, needs: Sequence[Need], ready: Sequence[Machine], traffic: Traffic, hub_bps: float
) -> Places | None:
    """An assignment whose every part takes at most so long for a token. The fastest machine gets the last segments,
    which have the head."""
    places: Places = []
    left = len(needs)
    for machine in ready:
        if left and min(machine.up_bps, machine.down_bps) * seconds < traffic.bits and len(needs) > 1:
            continue  # its line is too slow
        first = left
        flops = memory = 0.0
        while first:
            need = needs[first - 1]
            flops, memory = flops + need.flops_per_token, memory + need.memory_nbytes
            if flops > machine.flops * seconds or memory > machine.memory_nbytes:
                break
            first -= 1
        if first < left:
            places.insert(0, (machine, range(first, left)))
            left = first
    if left or hub_bps * seconds < (len(places) - 1) * traffic.bits:
        return None
    return places


def _describe(
    places: Places, needs: Sequence[Need], ready: Sequence[Machine], traffic: Traffic, hub_bps: float
) -> Assignment:
    parts: list[tuple[float, str]] = [((len(places) - 1) * traffic.bits / hub_bps, "the hub's line")]
    for machine, segments in places:
        flops = sum(needs[index].flops_per_token for index in segments)
        parts.append((flops / machine.flops, f"the processor of {machine.name}"))
        if len(places) > 1:
            inner = segments.start > 0 and segments.stop < len(needs)
            share = traffic.bits if inner else 8 * max(traffic.forward_nbytes, traffic.backward_nbytes)
            parts.append((share / min(machine.up_bps, machine.down_bps), f"the line of {machine.name}"))
    seconds, bottleneck = max(parts)
    used = {machine.name for machine, _ in places}
    return Assignment(
        places=tuple((machine.name, segments) for machine, segments in places),
        spares=tuple(machine.name for machine in ready if machine.name not in used),
        tokens_per_second=1 / seconds if seconds else float("inf"),
        bottleneck=bottleneck,
    )


def _what_is_missing(needs: Sequence[Need], machines: Sequence[Machine]) -> str:
    largest = max(need.memory_nbytes for need in needs)
    most = max(machine.memory_nbytes for machine in machines)
    if largest > most:
        index = max(range(len(needs)), key=lambda i: needs[i].memory_nbytes)
        return (
            f"segment {index} needs {format_bytes(largest)}, and the largest machine has {format_bytes(most)}: "
            "cut the model into more segments (model.boundaries), or bring a larger machine"
        )
    wanted, there = sum(need.memory_nbytes for need in needs), sum(machine.memory_nbytes for machine in machines)
    missing = max(wanted - there, largest)
    return (
        f"the model needs {format_bytes(wanted)}, and {len(machines)} machine(s) have {format_bytes(there)} in pieces "
        f"that do not fit: another machine with {format_bytes(missing)} would help"
    )
