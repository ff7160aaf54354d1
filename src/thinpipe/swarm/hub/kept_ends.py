"""Keeps the first and the last segment, which get token ids and labels, on machines of the hub's owner."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from thinpipe.core.errors import UserError
from thinpipe.planning.partition import Machine, Partition


def partition_with_kept_ends(
    machines: Sequence[Machine],
    owned: Collection[str],
    segments: int,
    partition: Callable[[Sequence[Machine]], Partition],
) -> Partition:
    """A partition in which only machines with the names in `owned` have the first or the last of this many segments.
    Raises UserError as `partition` does, and if there is no such machine."""
    if not owned:
        return partition(machines)
    kept = f"hub.keep_ends keeps the first and the last segment on {' and '.join(owned)}"
    if not any(machine.name in owned for machine in machines):
        raise UserError(f"{kept}, and none of them can compute now: start `thinpipe join` there")
    ends = frozenset((0, segments - 1))
    limited = [
        machine if machine.name in owned else replace(machine, excluded=machine.excluded | ends) for machine in machines
    ]
    try:
        return partition(limited)
    except UserError as error:
        absent = sorted(set(owned) - {machine.name for machine in machines})
        waits = f", of which {' and '.join(absent)} cannot compute now" if absent else ""
        raise UserError(f"{kept}{waits}, so the model does not fit ({error})") from error
