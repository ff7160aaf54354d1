"""Keeps segments on devices of the class that has computed them, so that the run stays exact (`core.exactness`).

With `hub.exact` nothing else is allowed. Otherwise a partition that keeps the promise is preferred to a slightly faster
one that ends it: speeds are measured in one second, and vary by more than `_WORTH` between two measurements.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from thinpipe.core.errors import UserError
from thinpipe.core.exactness import Exactness
from thinpipe.planning.partition import Machine, Partition

_WORTH = 0.8
"""Fraction of the fastest partition's speed at which a partition that keeps the promise is preferred."""


def like_machines(machines: Sequence[Machine], exactness: Exactness) -> list[Machine]:
    """Machines that can compute without ending the promise, each limited to the segments that it may compute."""
    limited = [replace(machine, excluded=exactness.unlike(machine.device_class)) for machine in machines]
    return [
        machine
        for machine in limited
        if machine.device_class and (not exactness.classes or len(machine.excluded) < len(exactness.classes))
    ]


def prefer_like(
    machines: Sequence[Machine], exactness: Exactness, partition: Callable[[Sequence[Machine]], Partition]
) -> Partition:
    """The fastest partition, or one that keeps the promise and is nearly as fast. Raises UserError as `partition`
    does."""
    fastest = partition(machines)
    excluded = {machine.name: exactness.unlike(machine.device_class) for machine in machines}
    if exactness.lost is not None or all(excluded[name].isdisjoint(segments) for name, segments in fastest.stages):
        return fastest
    try:
        like = partition(like_machines(machines, exactness))
    except UserError:
        return fastest
    return like if like.tokens_per_second >= _WORTH * fastest.tokens_per_second else fastest
