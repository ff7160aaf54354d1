"""Who computes which segments: a pure function of what machines can do and what segments need.

A pipeline is as fast as its slowest part: a machine's processor, its line in one direction, or the hub's line, through
which everything goes. The assignment makes the slowest part as fast as it can: it looks for the least time per token
at which some order of the machines (`swarm/places.py`) takes all segments. Machines that are not needed are spares.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes, say_flops, say_rate
from thinpipe.swarm.places import Machine, Need, Place, Traffic, find_places, line_loads, spread

__all__ = ["Assignment", "Machine", "Need", "Traffic", "assign"]

_HALVINGS = 50


@dataclass(frozen=True, kw_only=True)
class Assignment:
    places: tuple[tuple[str, range], ...]
    """Machines in the order of the pipeline, with their segments."""
    spares: tuple[str, ...]
    too_small: tuple[str, ...]
    """What is wrong, in words, with each spare that cannot hold any segment."""
    tokens_per_second: float
    """If nobody ever waits: what the slowest part allows."""
    bottleneck: str
    """That part, in words."""
    loads: tuple[tuple[str, float], ...]
    """Every part in words, with the tokens per second that it allows, the slowest first."""


def assign(
    needs: Sequence[Need],
    machines: Sequence[Machine],
    traffic: Traffic,
    *,
    hub_up_bps: float,
    hub_down_bps: float,
    shared_nbytes: int = 0,
    most: int | None = None,
    everyone: bool = False,
) -> Assignment:
    """`shared_nbytes`: what every machine holds once, beside its segments. `most`: no more machines than this.
    `everyone`: as many as there can be, even if fewer would be faster. Raises UserError, which says how much memory is
    missing, when the machines cannot hold the model."""
    if not machines:
        raise UserError("no machine has joined yet: send people an invite")
    ready = sorted(machines, key=lambda machine: (-machine.flops, machine.name))
    hub_bps = min(hub_up_bps, hub_down_bps)

    def within(seconds: float) -> list[Place] | None:
        return find_places(seconds, needs, ready, traffic, hub_bps=hub_bps, shared_nbytes=shared_nbytes, most=most)

    slowest_line = min(hub_bps, *(min(machine.up_bps, machine.down_bps) for machine in ready))
    work = sum(need.flops_per_token for need in needs) / min(machine.flops for machine in ready)
    low, high = 0.0, 1.001 * (work + len(ready) * traffic.bits / slowest_line)
    found = within(high)
    if found is None:
        raise UserError(_what_is_missing(needs, ready, shared_nbytes))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        better = within(middle)
        if better is None:
            low = middle
        else:
            found, high = better, middle
    if everyone:
        found = spread(needs, ready[:most], shared_nbytes=shared_nbytes) or found
    return _describe(found, needs, ready, _loads(found, needs, traffic, hub_up_bps, hub_down_bps), shared_nbytes)


def _loads(
    places: Sequence[Place], needs: Sequence[Need], traffic: Traffic, hub_up_bps: float, hub_down_bps: float
) -> list[tuple[float, str]]:
    """Seconds per token of every part that has anything to do."""
    bits = (len(places) - 1) * traffic.bits
    parts = [
        (bits / hub_up_bps, f"the hub's line (up, {say_rate(hub_up_bps)})"),
        (bits / hub_down_bps, f"the hub's line (down, {say_rate(hub_down_bps)})"),
    ]
    for index, (machine, segments) in enumerate(places):
        flops = sum(needs[segment].flops_per_token for segment in segments)
        parts.append((flops / machine.flops, f"the processor of {machine.name} ({say_flops(machine.flops)})"))
        up, down = line_loads(traffic, first=index == 0, last=index == len(places) - 1)
        parts.append((up / machine.up_bps, f"the line of {machine.name} (up, {say_rate(machine.up_bps)})"))
        parts.append((down / machine.down_bps, f"the line of {machine.name} (down, {say_rate(machine.down_bps)})"))
    return sorted((part for part in parts if part[0]), key=lambda part: -part[0])


def _describe(
    places: Sequence[Place],
    needs: Sequence[Need],
    ready: Sequence[Machine],
    parts: Sequence[tuple[float, str]],
    shared_nbytes: int,
) -> Assignment:
    used = {machine.name for machine, _ in places}
    spares = [machine for machine in ready if machine.name not in used]
    seconds, bottleneck = parts[0] if parts else (0.0, "nothing")
    return Assignment(
        places=tuple((machine.name, segments) for machine, segments in places),
        spares=tuple(machine.name for machine in spares),
        too_small=tuple(words for machine in spares if (words := _too_small(machine, needs, shared_nbytes))),
        tokens_per_second=1 / seconds if seconds else float("inf"),
        bottleneck=bottleneck,
        loads=tuple((words, 1 / seconds) for seconds, words in parts),
    )


def _too_small(machine: Machine, needs: Sequence[Need], shared_nbytes: int) -> str | None:
    least = min(need.memory_nbytes for need in needs) + shared_nbytes
    if machine.memory_nbytes >= least:
        return None
    return (
        f"{machine.name} has {format_bytes(machine.memory_nbytes)}, and the smallest segment needs "
        f"{format_bytes(least)}: {format_bytes(least - machine.memory_nbytes)} are missing"
    )


def _what_is_missing(needs: Sequence[Need], machines: Sequence[Machine], shared_nbytes: int) -> str:
    largest = max(need.memory_nbytes for need in needs) + shared_nbytes
    most = max(machine.memory_nbytes for machine in machines)
    if largest > most:
        index = max(range(len(needs)), key=lambda i: needs[i].memory_nbytes)
        return (
            f"segment {index} needs {format_bytes(largest)}, and the largest machine has {format_bytes(most)}: "
            "cut the model into more segments (model.boundaries), or bring a larger machine"
        )
    wanted = sum(need.memory_nbytes for need in needs)
    there = sum(max(0, machine.memory_nbytes - shared_nbytes) for machine in machines)
    missing = max(wanted - there + shared_nbytes, largest)
    return (
        f"the model needs {format_bytes(wanted)}, and {len(machines)} machine(s) have {format_bytes(there)} in pieces "
        f"that do not fit: another machine with {format_bytes(missing)} would help"
    )
