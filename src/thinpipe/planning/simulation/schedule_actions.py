"""Pipeline schedules as lists of passes per process, in execution order. No torch.

They mirror the schedules with which runs compute (`pipeline/pipeline_runner.py`). When a pass can start and how long it
takes is determined by `simulate`.
"""

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

from thinpipe.core.errors import UserError
from thinpipe.pipeline.placement import stages_of


class PassKind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    """Full backward pass: input and weight gradients."""
    INPUT = "I"
    """Input gradients only, which the previous stage waits for."""
    WEIGHT = "W"
    """Weight gradients only."""


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: PassKind
    microbatch: int


def action_lists(schedule: str, processes: int, microbatches: int, *, extra: int = 0) -> list[list[Action]]:
    """Passes of each process. Raises UserError if the schedule cannot run with these numbers.

    `extra` (1F1B only): additional warm-up forward passes of a stage for every stage after it.
    """
    stages_by_process = stages_of(schedule, processes)
    if processes == 1:
        return [list(chain.from_iterable(_both(0, microbatch) for microbatch in range(microbatches)))]
    _refuse_few(schedule, processes, microbatches)
    if extra and schedule != "1F1B":
        raise UserError(f"more micro-batches in flight are for 1F1B, not {schedule}: leave them at 0")
    if schedule == "GPipe":
        return [list(_warm_then_alternate(stage, microbatches, microbatches)) for (stage,) in stages_by_process]
    if schedule == "1F1B":
        warmup = [(1 + extra) * (processes - 1 - stage) + 1 for (stage,) in stages_by_process]
        return [list(_warm_then_alternate(stage, microbatches, warmup[stage])) for (stage,) in stages_by_process]
    if schedule == "Interleaved1F1B":
        return [list(_interleaved(process, processes, microbatches)) for process in range(processes)]
    return [
        [a for a in _zero_bubble_v(process, processes, microbatches) if a.microbatch < microbatches]
        for process in range(processes)
    ]


def _refuse_few(schedule: str, processes: int, microbatches: int) -> None:
    """Raises UserError for a number of micro-batches with which the schedule cannot run."""
    min_microbatches = processes if schedule == "1F1B" else 1
    if microbatches < min_microbatches:
        raise UserError(
            f"{schedule} on {processes} processes needs {min_microbatches} micro-batches or more, not {microbatches}"
        )
    rounds = max(1, microbatches // processes)
    if schedule == "Interleaved1F1B" and microbatches % rounds:
        raise UserError(
            f"Interleaved1F1B on {processes} processes cannot share {microbatches} micro-batches equally: "
            f"make them a multiple of {processes}"
        )


def _both(stage: int, microbatch: int) -> tuple[Action, Action]:
    return Action(stage, PassKind.FORWARD, microbatch), Action(stage, PassKind.BACKWARD, microbatch)


def _warm_then_alternate(stage: int, microbatches: int, warmup: int) -> Iterator[Action]:
    """`warmup` forward passes, then backward and forward passes in turn, then the remaining backward passes."""
    warmup = min(warmup, microbatches)
    for microbatch in range(warmup):
        yield Action(stage, PassKind.FORWARD, microbatch)
    for microbatch in range(microbatches):
        yield Action(stage, PassKind.BACKWARD, microbatch)
        if warmup + microbatch < microbatches:
            yield Action(stage, PassKind.FORWARD, warmup + microbatch)


def _interleaved(process: int, processes: int, microbatches: int) -> Iterator[Action]:
    """Interleaved 1F1B: a round of micro-batches passes one stage of the process, then the other (arXiv 2104.04473)."""
    a_round = microbatches // max(1, microbatches // processes)
    passes = 2 * microbatches
    warmup = min(a_round + 2 * (processes - 1 - process), passes)

    def nth(number: int, kind: PassKind) -> Action:
        rounds, place = divmod(number, 2 * a_round)
        local = place // a_round if kind is PassKind.FORWARD else 1 - place // a_round
        return Action(process + local * processes, kind, rounds * a_round + place % a_round)

    for number in range(warmup):
        yield nth(number, PassKind.FORWARD)
    for number in range(passes):
        if warmup + number < passes:
            yield nth(warmup + number, PassKind.FORWARD)
        yield nth(number, PassKind.BACKWARD)


def _zero_bubble_v(process: int, processes: int, microbatches: int) -> Iterator[Action]:
    """ZB-V: micro-batches go down through the first stages and back up through the second ones; weight gradients fill
    the gaps (arXiv 2401.10241, section 6).

    Yields at least 2 x `processes` - 1 micro-batches, which the schedule needs; the caller drops those beyond its own.
    """
    there, back = process, 2 * processes - 1 - process
    total = max(2 * processes - 1, microbatches)
    done = {(stage, kind): 0 for stage in (there, back) for kind in PassKind}

    def run(stage: int, *kinds: PassKind) -> Iterator[Action]:
        for kind in kinds:
            yield Action(stage, kind, done[stage, kind])
            done[stage, kind] += 1

    for _ in range(2 * (processes - process) - 1):
        yield from run(there, PassKind.FORWARD)
    for _ in range(process):
        yield from run(back, PassKind.FORWARD)
        yield from run(there, PassKind.FORWARD)
    for _ in range(processes - process):
        yield from run(back, PassKind.FORWARD, PassKind.INPUT, PassKind.WEIGHT)
    while done[back, PassKind.FORWARD] < total:
        if done[there, PassKind.FORWARD] < total:
            yield from run(there, PassKind.FORWARD)
        yield from run(there, PassKind.INPUT, PassKind.WEIGHT)
        yield from run(back, PassKind.FORWARD, PassKind.INPUT, PassKind.WEIGHT)
    for _ in range(process):
        yield from run(there, PassKind.INPUT)
        yield from run(back, PassKind.INPUT)
    for _ in range(processes - process):
        yield from run(there, PassKind.INPUT, PassKind.WEIGHT)
    for stage in (back, there):
        while done[stage, PassKind.WEIGHT] < done[stage, PassKind.INPUT]:
            yield from run(stage, PassKind.WEIGHT)
