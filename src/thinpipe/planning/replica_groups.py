"""Groups of machines for replicas: pipelines that hold a whole model each and train at the same time."""

from collections.abc import Sequence

from thinpipe.planning.partition import Machine


def deal(machines: Sequence[Machine], count: int) -> list[list[Machine]]:
    """Deals machines to `count` groups of nearly equal memory, the largest machines first."""
    groups: list[list[Machine]] = [[] for _ in range(count)]
    for machine in sorted(machines, key=lambda each: (-each.memory_nbytes, -each.flops, each.name)):
        min(groups, key=lambda group: sum(each.memory_nbytes for each in group)).append(machine)
    return groups
