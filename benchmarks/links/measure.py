"""Measures tasks: keeps the processes that the next task can use, and starts others where it cannot."""

from dataclasses import replace
from types import TracebackType
from typing import Self

from msgspec import structs

from benchmarks.links.commands import Timing
from benchmarks.links.points import Point, ProcessMemory, RunTimes, Task
from benchmarks.links.worker_pool import WorkerPool, slowest
from benchmarks.links.workload import Run
from benchmarks.pairs import compare
from benchmarks.step.peak_memory import RETURN_BLOCKS_AT_ONCE


class Meter:
    """A context manager: at the end of the block all processes are gone."""

    def __init__(self) -> None:
        self._crew: WorkerPool | None = None
        self._threads = 0

    def measure(self, task: Task) -> Point:
        if task.memory:
            self.close()  # nobody else may hold memory or a processor meanwhile
            return _measure_memory(task)
        crew = self._pool_for(task)
        crew.prepare(task.runs)
        times = _time_pairs(task, crew) if task.pairs else _time_steps(task, crew)
        operators = crew.operators(task.runs[-1]) if task.operators else []
        return Point(key=task.key, task=task, times=times, operators=operators)

    def _pool_for(self, task: Task) -> WorkerPool:
        size = task.runs[0].shape.stages
        if self._crew is None or self._crew.size != size or self._threads != task.threads:
            self.close()
            self._crew, self._threads = WorkerPool(size, threads=task.threads).__enter__(), task.threads
        return self._crew

    def close(self, kind: type[BaseException] | None = None) -> None:
        if self._crew is not None:
            self._crew.__exit__(kind, None, None)
            self._crew = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(kind)


def _time_pairs(task: Task, crew: WorkerPool) -> list[RunTimes]:
    first, second = task.runs
    seen: dict[Run, list[list[Timing]]] = {first: [], second: []}

    def timed(run: Run) -> float:
        seen[run].append(crew.time(run, 1))
        return slowest(seen[run][-1])[0]

    compare(lambda: timed(first), lambda: timed(second), pairs=task.pairs, warmup=0)
    return [_run_times(seen[run]) for run in task.runs]


def _time_steps(task: Task, crew: WorkerPool) -> list[RunTimes]:
    """In turn, as long as a run has steps left: all of them see the same weather."""
    seen: list[list[list[Timing]]] = [[] for _ in task.runs]
    for turn in range(max(task.steps)):
        for run, steps, parts in zip(task.runs, task.steps, seen, strict=True):
            if turn < steps:
                parts.append(crew.time(run, 1))
    return [_run_times(parts) for parts in seen]


def _run_times(parts: list[list[Timing]]) -> RunTimes:
    """From what the processes said, asked once or several times."""
    processes = list(zip(*parts, strict=True))
    busy = [[share for timing in timings for share in timing.busy] for timings in processes]
    return RunTimes(
        seconds=[seconds for timings in parts for seconds in slowest(timings)],
        busy=busy if any(busy) else [],
        loss=parts[-1][-1].loss,
    )


def _measure_memory(task: Task) -> Point:
    """A toy of the same kind runs first, because libraries load a hundred megabytes on first use."""
    (run,), (steps,) = task.runs, task.steps
    small = replace(run.shape, dim=16 * run.shape.heads, hidden_dim=64, vocab=64, seq_len=16, sequences=1)
    toy = structs.replace(run, shape=small, width=None if run.width is None else 8)
    with WorkerPool(run.shape.stages, threads=task.threads, variables=RETURN_BLOCKS_AT_ONCE) as crew:
        crew.prepare([toy])
        crew.prepare([])
        before = crew.memory()
        crew.prepare([run])
        times = _run_times([crew.time(run, steps)])
        after = crew.memory()
    memory = [
        ProcessMemory(
            kept_nbytes=late.held_nbytes - early.held_nbytes, peak_nbytes=late.peak_nbytes - early.held_nbytes
        )
        for early, late in zip(before, after, strict=True)
    ]
    return Point(key=task.key, task=task, times=[times], memory=memory)
