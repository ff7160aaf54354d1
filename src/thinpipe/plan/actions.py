"""What every process computes in a step, in order, as the schedules of a run have it: lists of passes, without torch.

A pass belongs to a stage and a micro-batch. When it can begin, and how long it takes, is `simulate`'s part.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from thinpipe.core.errors import UserError
from thinpipe.pipeline.placement import stages_of


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    """Both parts of a backward pass at once."""
    INPUT = "I"
    """The part of a backward pass that the stage before waits for."""
    WEIGHT = "W"
    """The rest of it."""


class Action(NamedTuple):
    stage: int
    kind: Kind
    microbatch: int


def action_lists(schedule: str, processes: int, microbatches: int, *, extra: int = 0) -> list[list[Action]]:
    """For each process. `extra` is for 1F1B: so many more forward passes before the first backward one, for each stage
    that follows."""
    homes = stages_of(schedule, processes)
    if processes == 1:
        return [list(chain.from_iterable(_both(0, microbatch) for microbatch in range(microbatches)))]
    _refuse_few(schedule, processes, microbatches)
    if extra and schedule != "1F1B":
        raise UserError(f"more micro-batches under way are for 1F1B, not {schedule}: leave them at 0")
    if schedule == "GPipe":
        return [list(_warm_then_alternate(stage, microbatches, microbatches)) for (stage,) in homes]
    if schedule == "1F1B":
        warm = [(1 + extra) * (processes - 1 - stage) + 1 for (stage,) in homes]
        return [list(_warm_then_alternate(stage, microbatches, warm[stage])) for (stage,) in homes]
    if schedule == "Interleaved1F1B":
        return [list(_interleaved(process, processes, microbatches)) for process in range(processes)]
    return [
        [a for a in _zbv(process, processes, microbatches) if a.microbatch < microbatches]
        for process in range(processes)
    ]


def _refuse_few(schedule: str, processes: int, microbatches: int) -> None:
    least = processes if schedule == "1F1B" else 1
    if microbatches < least:
        raise UserError(f"{schedule} on {processes} processes needs {least} micro-batches or more, not {microbatches}")
    rounds = max(1, microbatches // processes)
    if schedule == "Interleaved1F1B" and microbatches % rounds:
        raise UserError(
            f"Interleaved1F1B on {processes} processes cannot share {microbatches} micro-batches equally: "
            f"make them a multiple of {processes}"
        )


def _both(stage: int, microbatch: int) -> tuple[Action, Action]:
    return Action(stage, Kind.FORWARD, microbatch), Action(stage, Kind.BACKWARD, microbatch)


def _warm_then_alternate(stage: int, microbatches: int, warm: int) -> Iterator[Action]:
    """So many forward passes; then backward and forward in turn; then the backward passes that are left."""
    warm = min(warm, microbatches)
    for microbatch in range(warm):
        yield Action(stage, Kind.FORWARD, microbatch)
    for microbatch in range(microbatches):
        yield Action(stage, Kind.BACKWARD, microbatch)
        if warm + microbatch < microbatches:
            yield Action(stage, Kind.FORWARD, warm + microbatch)


def _interleaved(process: int, processes: int, microbatches: int) -> Iterator[Action]:
    """Rounds of micro-batches through one stage of the process and then the other (arXiv 2104.04473)."""
    a_round = microbatches // max(1, microbatches // processes)
    passes = 2 * microbatches
    warm = min(a_round + 2 * (processes - 1 - process), passes)

    def nth(number: int, kind: Kind) -> Action:
        rounds, place = divmod(number, 2 * a_round)
        local = place // a_round if kind is Kind.FORWARD else 1 - place // a_round
        return Action(process + local * processes, kind, rounds * a_round + place % a_round)

    for number in range(warm):
        yield nth(number, Kind.FORWARD)
    for number in range(passes):
        if warm + number < passes:
            yield nth(warm + number, Kind.FORWARD)
        yield nth(number, Kind.BACKWARD)


def _zbv(process: int, processes: int, microbatches: int) -> Iterator[Action]:
    """There in the first stage of a process, back in its second, weights where there is room (arXiv 2401.10241, 6).

    As many micro-batches as fill it; whoever has fewer leaves out the rest.
    """
    there, back = process, 2 * processes - 1 - process
    total = max(2 * processes - 1, microbatches)
    done = {(stage, kind): 0 for stage in (there, back) for kind in Kind}

    def run(stage: int, *kinds: Kind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(stage, kind, done[stage, kind])
            done[stage, kind] += 1

    for _ in range(2 * (processes - process) - 1):
        yield from run(there, Kind.FORWARD)
    for _ in range(process):
        yield from run(back, Kind.FORWARD)
        yield from run(there, Kind.FORWARD)
    for _ in range(processes - process):
        yield from run(back, Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    while done[back, Kind.FORWARD] < total:
        if done[there, Kind.FORWARD] < total:
            yield from run(there, Kind.FORWARD)
        yield from run(there, Kind.INPUT, Kind.WEIGHT)
        yield from run(back, Kind.FORWARD, Kind.INPUT, Kind.WEIGHT)
    for _ in range(process):
        yield from run(there, Kind.INPUT)
        yield from run(back, Kind.INPUT)
    for _ in range(processes - process):
        yield from run(there, Kind.INPUT, Kind.WEIGHT)
    for stage in (back, there):
        while done[stage, Kind.WEIGHT] < done[stage, Kind.INPUT]:
            yield from run(stage, Kind.WEIGHT)
