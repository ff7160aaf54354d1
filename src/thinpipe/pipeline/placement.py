"""Which segments make a stage and which stages a process has, for every schedule. No torch here: plans need it too."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from thinpipe.core.errors import UserError


class Layout(NamedTuple):
    stages_per_process: int
    shape: Literal["loop", "v"] = "loop"
    """loop: process r has stages r, r + N, ...; v: r and, on the way back, the one opposite."""
    takes_extra: bool = False
    """More micro-batches may be under way than it would have by itself."""


LAYOUTS: dict[str, Layout] = {
    "GPipe": Layout(1),
    "1F1B": Layout(1, takes_extra=True),
    "Interleaved1F1B": Layout(2),
    "ZBVZeroBubble": Layout(2, shape="v"),
}
"""By the names of `pipeline/schedules.py`."""


@dataclass(frozen=True)
class Placement:
    """In the order that the schedule wants."""

    stages: list[range]
    processes: list[list[int]]

    def segments_of(self, process: int) -> list[int]:
        return [segment for stage in self.processes[process] for segment in self.stages[stage]]

    @property
    def homes(self) -> list[int]:
        """The process of every segment."""
        process_of = {stage: process for process, stages in enumerate(self.processes) for stage in stages}
        return [process_of[stage] for stage, segments in enumerate(self.stages) for _ in segments]

    @property
    def last_process(self) -> int:
        """The one with the last segment."""
        return next(rank for rank, stages in enumerate(self.processes) if len(self.stages) - 1 in stages)


def stages_of(schedule: str, processes: int) -> list[list[int]]:
    """The stages of each process. One process has all segments as one."""
    if schedule not in LAYOUTS:
        raise UserError(f"there is no schedule {schedule!r}: write one of {', '.join(LAYOUTS)}")
    if processes == 1:
        return [[0]]
    layout = LAYOUTS[schedule]
    count = processes * layout.stages_per_process
    if layout.shape == "v":
        return [[rank, count - 1 - rank] for rank in range(processes)]
    return [list(range(rank, count, processes)) for rank in range(processes)]


def place(schedule: str, processes: int, segments: int, shares: Sequence[int] | None = None) -> Placement:
    """Segments in equal shares, the larger ones first, where they do not come out even; or in these shares."""
    if processes == 1:
        return Placement([range(segments)], stages_of(schedule, 1))
    count = processes * LAYOUTS[schedule].stages_per_process
    if segments < count:
        raise UserError(
            f"{schedule} on {processes} processes needs a model of {count} segments or more, and this one has "
            f"{segments}: set model.boundaries to at least {count - 1} cuts, or change the schedule or "
            "parallelism.pipeline_parallel_degree"
        )
    if shares is not None and (len(shares) != count or sum(shares) != segments or min(shares) < 1):
        raise UserError(
            f"parallelism.pipeline_parallel_shares {list(shares)} must be {count} numbers, one for each stage, of 1 or "
            f"more, which together make the model's {segments} segments"
        )
    equal = [-(-index * segments // count) for index in range(count + 1)]
    starts = equal if shares is None else [0, *accumulate(shares)]
    return Placement([range(start, stop) for start, stop in pairwise(starts)], stages_of(schedule, processes))
