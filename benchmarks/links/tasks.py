"""The points of each part of `python -m benchmarks.links`, in the order in which they are measured."""

from collections.abc import Callable, Iterator
from itertools import product

from msgspec.structs import replace

from benchmarks.links.bounds import link_bound_seconds
from benchmarks.links.config import LinksConfig
from benchmarks.links.points import Task
from benchmarks.links.workload import Run, RunLink, Shape
from thinpipe.config.boundary import FormatName

LONG_SECONDS = 5.0
"""Steps that take longer on the link alone vary little: one fewer is timed."""
STEPS_AT_FULL_SPEED = 2
"""Beside each point."""
MEMORY_STEPS = 2
"""After the first, which allocates the optimiser's state."""


def all_tasks(config: LinksConfig) -> list[Task]:
    return [task for part in config.parts for task in PARTS[part](config)]


def engine_tasks(config: LinksConfig) -> Iterator[Task]:
    part = config.engine
    for schedule in part.schedules:
        own = Run(shape=part.shape, schedule=schedule)
        yield Task(
            part="engine",
            name=f"{schedule}: ours and the bare engine",
            runs=(own, replace(own, bare=True)),
            pairs=part.pairs,
            threads=config.threads,
        )


def sweep_methods(config: LinksConfig) -> list[tuple[int | None, FormatName]]:
    """Widths and number formats: dense, and every compression in two formats."""
    dim = config.sweep.shape.dim
    formats: tuple[FormatName, ...] = ("bf16", "int8")
    widths = [dim // compression for compression in config.sweep.compressions]
    return [(None, "bf16"), *product(widths, formats)]


def sweep_tasks(config: LinksConfig) -> Iterator[Task]:
    """Steps at full speed are taken in turn with those of each point, so that both see the same weather."""
    part = config.sweep
    for width, number_format in sweep_methods(config):
        free = Run(shape=part.shape, width=width, number_format=number_format, extra=part.extra)
        for round_trip_ms, mbps in product(part.round_trips_ms, part.mbps):
            run = replace(free, link=RunLink(mbps=mbps, round_trip_ms=round_trip_ms))
            long = link_bound_seconds(run) > LONG_SECONDS
            yield Task(
                part="sweep",
                name=f"{run.method} at {run.link.text}",
                runs=(free, run),
                steps=(1, max(1, part.steps - 1)) if long else (STEPS_AT_FULL_SPEED, part.steps),
                threads=config.threads,
            )


def ratio_tasks(config: LinksConfig) -> Iterator[Task]:
    part = config.ratio

    def task(name: str, shape: Shape, pairs: int) -> Task:
        link = RunLink(mbps=part.mbps)
        dense = Run(shape=shape, number_format="bf16", extra=part.extra, link=link)
        thin = replace(dense, width=shape.dim // part.compression, number_format=part.number_format)
        return Task(part="ratio", name=name, runs=(dense, thin), pairs=pairs, operators=True, threads=config.threads)

    yield task("little to compute", part.shape, part.pairs)
    yield task("much to compute", part.heavy, part.heavy_pairs)


def schedules_tasks(config: LinksConfig) -> Iterator[Task]:
    """All schedules in turn, so that they see the same weather; then the memory of each by itself."""
    part = config.schedules
    kinds = [(schedule, 0) for schedule in part.schedules]
    kinds += [("1F1B", part.extra)] if part.extra and "1F1B" in part.schedules else []
    methods: list[tuple[int | None, FormatName]] = [(None, "bf16")]
    methods += [(part.shape.dim // compression, "int8") for compression in part.compressions]
    for width, number_format in methods:
        runs = tuple(
            Run(
                shape=part.shape,
                width=width,
                number_format=number_format,
                schedule=schedule,
                extra=extra,
                link=RunLink(mbps=part.mbps, round_trip_ms=part.round_trip_ms),
            )
            for schedule, extra in kinds
        )
        name, threads = runs[0].method, config.threads
        yield Task(part="schedules", name=name, runs=runs, steps=(part.steps,) * len(runs), threads=threads)
        for run in runs:
            name = f"memory of {run.method}, {run.schedule_text}"
            yield Task(part="schedules", name=name, runs=(run,), steps=(MEMORY_STEPS,), memory=True, threads=threads)


PARTS: dict[str, Callable[[LinksConfig], Iterator[Task]]] = {
    "engine": engine_tasks,
    "sweep": sweep_tasks,
    "ratio": ratio_tasks,
    "schedules": schedules_tasks,
}
