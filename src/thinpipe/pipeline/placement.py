"""Placement for each pipeline schedule: segments of every stage and stages of every process. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError


class ScheduleLayout(NamedTuple):
    """How a pipeline schedule assigns stages to processes."""

    stages_per_process: int
    shape: Literal["loop", "v"] = "loop"
    """For N processes, process r has stages r, r + N, ... ("loop"), or r and 2N - 1 - r ("v")."""
    allows_extra_microbatches: bool = False
    """True if the schedule can keep extra micro-batches in flight (`pipeline_parallel_extra_microbatches`)."""


SCHEDULE_LAYOUTS: dict[str, ScheduleLayout] = {
    "GPipe": ScheduleLayout(1),
    "1F1B": ScheduleLayout(1, allows_extra_microbatches=True),
    "Interleaved1F1B": ScheduleLayout(2),
    "ZBVZeroBubble": ScheduleLayout(2, shape="v"),
}
"""Keys: schedule names, as in `SCHEDULES` of `pipeline/pipeline_runner.py`."""


@dataclass(frozen=True)
class Placement:
    """Assignment of segments to stages and of stages to processes."""

    stages: list[range]
    """Segments of each stage."""
    processes: list[list[int]]
    """Stages of each process, in the order that the torch schedule expects."""

    def segments_of(self, process: int) -> list[int]:
        return [segment for stage in self.processes[process] for segment in self.stages[stage]]

    def in_words(self, names: Sequence[str]) -> str:
        """Who computes how many segments; `names`: of the processes."""
        counts = [len(self.segments_of(process)) for process in range(len(self.processes))]
        if len(counts) == 1:
            return "now computed by one process"
        listed = ", ".join(f"{name} has {count}" for name, count in zip(names, counts, strict=True))
        return f"now {len(counts)} processes: of {sum(counts)} segments {listed}"

    @property
    def process_of_segment(self) -> list[int]:
        """Rank of the process of each segment."""
        process_of = {stage: process for process, stages in enumerate(self.processes) for stage in stages}
        return [process_of[stage] for stage, segments in enumerate(self.stages) for _ in segments]

    @property
    def last_process(self) -> int:
        """Rank of the process with the last segment."""
        return next(rank for rank, stages in enumerate(self.processes) if len(self.stages) - 1 in stages)


def stages_of(schedule: str, processes: int) -> list[list[int]]:
    """Stages of each process. A single process has all segments in one stage."""
    if schedule not in SCHEDULE_LAYOUTS:
        raise UserError(f"there is no schedule {schedule!r}: write one of {', '.join(SCHEDULE_LAYOUTS)}")
    if processes == 1:
        return [[0]]
    layout = SCHEDULE_LAYOUTS[schedule]
    count = processes * layout.stages_per_process
    if layout.shape == "v":
        return [[rank, count - 1 - rank] for rank in range(processes)]
    return [list(range(rank, count, processes)) for rank in range(processes)]


def place(schedule: str, processes: int, segments: int, shares: Sequence[int] | None = None) -> Placement:
    """Placement with `shares[i]` segments in stage i; default: stage i begins at ceil(i * segments / stages).

    Raises UserError if there are fewer segments than stages, or if `shares` does not fit.
    """
    if processes == 1:
        return Placement([range(segments)], stages_of(schedule, 1))
    count = processes * SCHEDULE_LAYOUTS[schedule].stages_per_process
    if segments < count:
        raise UserError(
            f"{schedule} on {processes} processes needs a model of at least {count} segments, and this model "
            f"has {segments}: name {count - 1} or more blocks in model.boundaries, before which it is cut, or change "
            "the schedule or parallelism.pipeline_parallel_degree"
        )
    if shares is not None and (len(shares) != count or sum(shares) != segments or min(shares) < 1):
        raise UserError(
            f"parallelism.pipeline_parallel_shares {list(shares)} must be {count} numbers of at least 1, one for "
            f"each stage, with the model's {segments} segments as their sum"
        )
    equal = [-(-index * segments // count) for index in range(count + 1)]
    starts = equal if shares is None else [0, *accumulate(shares)]
    return Placement([range(start, stop) for start, stop in pairwise(starts)], stages_of(schedule, processes))


def in_flight_microbatches(index: int, count: int, processes: int, config: RunConfig) -> int:
    """Maximum number of micro-batches whose activations segment `index` of `count` holds at once.

    That is the number of forward passes before the first backward pass, for segments shared by `processes` processes.
    """
    if processes == 1:
        return 1
    if config.parallelism.pipeline_parallel_schedule != "1F1B":
        return config.microbatches  # exact for GPipe, an upper bound for the others
    after = min(processes - 1, count - 1 - index)
    extra = config.parallelism.pipeline_parallel_extra_microbatches
    return min(config.microbatches, 1 + after * (1 + extra))
