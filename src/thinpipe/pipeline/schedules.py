"""Schedules by name: torch's own, with the places they give to segments. Adding one is a line here."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from thinpipe.core.errors import UserError


@dataclass(frozen=True)
class ScheduleKind:
    make: Callable[..., Any]
    segments_per_process: int
    shape: Literal["loop", "v"] = "loop"
    """loop: process r has segments r, r + N, ...; v: r and, on the way back, the one opposite."""


SCHEDULES: dict[str, ScheduleKind] = {
    "GPipe": ScheduleKind(ScheduleGPipe, 1),
    "1F1B": ScheduleKind(Schedule1F1B, 1),
    "Interleaved1F1B": ScheduleKind(ScheduleInterleaved1F1B, 2),
    "ZBVZeroBubble": ScheduleKind(ScheduleZBVZeroBubble, 2, shape="v"),
}


def place(schedule: str, processes: int, segments: int) -> list[list[int]]:
    """The segments of each process, in the order in which its stages are given to the schedule."""
    kind = SCHEDULES[schedule]
    if segments != processes * kind.segments_per_process:
        wanted = processes * kind.segments_per_process
        raise UserError(
            f"{schedule} on {processes} processes needs a model of {wanted} segments, and this one has {segments}: "
            f"set model.boundaries to {wanted - 1} cuts, or change the schedule or the number of processes"
        )
    if kind.shape == "v":
        return [[rank, 2 * processes - 1 - rank] for rank in range(processes)]
    return [list(range(rank, segments, processes)) for rank in range(processes)]
