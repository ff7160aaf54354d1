"""Partitioning of the model over machines: which machine computes which segments, as a pure function.

A pipeline is as fast as its slowest resource: a machine's processor, its uplink or downlink, or the hub's link, which
carries all messages. The partition minimises the time per token of the slowest resource: a bisection over that time,
with the feasibility test of `partition_search.py`. Machines that are not needed become standbys.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bit_rate, format_bytes, format_flops
from thinpipe.planning.partition_search import (
    Machine,
    PlacedStage,
    SegmentNeeds,
    Traffic,
    find_partition,
    link_loads,
    needed_nbytes,
    spread_over_all,
)

__all__ = ["Machine", "Partition", "SegmentNeeds", "Traffic", "make_partition"]

_BISECTIONS = 50


@dataclass(frozen=True, kw_only=True)
class Partition:
    stages: tuple[tuple[str, range], ...]
    """Machine names in pipeline order, with their segments."""
    standbys: tuple[str, ...]
    """Names of the machines without a stage."""
    too_small: tuple[str, ...]
    """One sentence for each standby whose memory cannot hold any segment."""
    tokens_per_second: float
    """Upper bound set by the slowest resource, as if no stage ever waited for another."""
    bottleneck: str
    """Description of the slowest resource."""
    loads: tuple[tuple[str, float], ...]
    """Description and tokens/s limit of every resource in use, slowest first."""


def make_partition(
    needs: Sequence[SegmentNeeds],
    machines: Sequence[Machine],
    traffic: Traffic,
    *,
    hub_up_bps: float,
    hub_down_bps: float,
    shared_nbytes: int = 0,
    max_machines: int | None = None,
    use_all_peers: bool = False,
) -> Partition:
    """Finds the fastest partition. Raises UserError, with the missing memory, if the machines cannot hold the model.

    `shared_nbytes`: bytes that every machine holds once, beside its segments. `max_machines`: upper limit on stages.
    `use_all_peers`: use as many machines as possible, even if fewer would be faster.
    """
    if not machines:
        raise UserError("no machine has joined yet: send people an invite")
    ready = sorted(machines, key=lambda machine: (-machine.flops, machine.name))
    hub_bps = min(hub_up_bps, hub_down_bps)

    def within(seconds: float) -> list[PlacedStage] | None:
        return find_partition(
            seconds, needs, ready, traffic, hub_bps=hub_bps, shared_nbytes=shared_nbytes, max_machines=max_machines
        )

    slowest_link = min(hub_bps, *(min(machine.up_bps, machine.down_bps) for machine in ready))
    work = sum(need.flops_per_token for need in needs) / min(machine.flops for machine in ready)
    low, high = 0.0, 1.001 * (work + traffic.relayed_bits(len(ready) + 1) / slowest_link)
    found = within(high)
    if found is None:
        raise UserError(_missing_memory_text(needs, ready, shared_nbytes))
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        better = within(middle)
        if better is None:
            low = middle
        else:
            found, high = better, middle
    if use_all_peers:
        found = spread_over_all(needs, ready[:max_machines], shared_nbytes=shared_nbytes) or found
    return _make_result(found, needs, ready, _loads(found, needs, traffic, hub_up_bps, hub_down_bps), shared_nbytes)


def _loads(
    stages: Sequence[PlacedStage],
    needs: Sequence[SegmentNeeds],
    traffic: Traffic,
    hub_up_bps: float,
    hub_down_bps: float,
) -> list[tuple[float, str]]:
    """Seconds per token and description of every resource in use, slowest first."""
    bits = traffic.relayed_bits(len(stages))
    parts = [
        (bits / hub_up_bps, f"the hub's link (up, {format_bit_rate(hub_up_bps)})"),
        (bits / hub_down_bps, f"the hub's link (down, {format_bit_rate(hub_down_bps)})"),
    ]
    for index, (machine, segments) in enumerate(stages):
        flops = sum(needs[segment].flops_per_token for segment in segments)
        parts.append((flops / machine.flops, f"the processor of {machine.name} ({format_flops(machine.flops)})"))
        up, down = link_loads(traffic, first=index == 0, last=index == len(stages) - 1)
        parts.append((up / machine.up_bps, f"the link of {machine.name} (up, {format_bit_rate(machine.up_bps)})"))
        parts.append(
            (down / machine.down_bps, f"the link of {machine.name} (down, {format_bit_rate(machine.down_bps)})")
        )
    return sorted((part for part in parts if part[0]), key=lambda part: -part[0])


def _make_result(
    stages: Sequence[PlacedStage],
    needs: Sequence[SegmentNeeds],
    ready: Sequence[Machine],
    parts: Sequence[tuple[float, str]],
    shared_nbytes: int,
) -> Partition:
    used = {machine.name for machine, _ in stages}
    standbys = [machine for machine in ready if machine.name not in used]
    seconds, bottleneck = parts[0] if parts else (0.0, "nothing")
    return Partition(
        stages=tuple((machine.name, segments) for machine, segments in stages),
        standbys=tuple(machine.name for machine in standbys),
        too_small=tuple(words for machine in standbys if (words := _too_small(machine, needs, shared_nbytes))),
        tokens_per_second=1 / seconds if seconds else float("inf"),
        bottleneck=bottleneck,
        loads=tuple((words, 1 / seconds) for seconds, words in parts),
    )


def _too_small(machine: Machine, needs: Sequence[SegmentNeeds], shared_nbytes: int) -> str | None:
    min_nbytes = min(needed_nbytes(need, machine) for need in needs) + shared_nbytes
    if machine.memory_nbytes >= min_nbytes:
        return None
    return (
        f"{machine.name} has {format_bytes(machine.memory_nbytes)}, and the smallest segment needs "
        f"{format_bytes(min_nbytes)}: {format_bytes(min_nbytes - machine.memory_nbytes)} are missing"
    )


def _missing_memory_text(needs: Sequence[SegmentNeeds], machines: Sequence[Machine], shared_nbytes: int) -> str:
    largest = max(need.memory_nbytes for need in needs) + shared_nbytes
    max_machines = max(machine.memory_nbytes for machine in machines)
    if largest > max_machines:
        index = max(range(len(needs)), key=lambda i: needs[i].memory_nbytes)
        return (
            f"segment {index} needs {format_bytes(largest)}, and the largest machine has {format_bytes(max_machines)}: "
            "cut the model into more segments (model.boundaries), or bring a larger machine"
        )
    hosts = [machine.host_memory_nbytes for machine in machines]
    index = max(range(len(needs)), key=lambda i: needs[i].host_nbytes)
    if all(host is not None and host < needs[index].host_nbytes for host in hosts):
        return (
            f"segment {index} needs {format_bytes(needs[index].host_nbytes)} of host memory, for offloaded optimiser "
            f"state, and the largest has {format_bytes(max(host or 0 for host in hosts))}: cut the model into more "
            "segments (model.boundaries)"
        )
    wanted = sum(need.memory_nbytes for need in needs)
    there = sum(max(0, machine.memory_nbytes - shared_nbytes) for machine in machines)
    missing = max(wanted - there + shared_nbytes, largest)
    return (
        f"the model needs {format_bytes(wanted)}, and {len(machines)} machine(s) have {format_bytes(there)} in pieces "
        f"that do not fit: another machine with {format_bytes(missing)} would help"
    )
