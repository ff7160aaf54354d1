"""`python -m benchmarks.links`: measures what is missing, point by point, then writes JSON, a summary and the
figures."""

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from benchmarks.command_line import run_benchmark
from benchmarks.links import report as links_summary
from benchmarks.links import results as links_results
from benchmarks.links.bounds import link_bound_seconds
from benchmarks.links.config import LinksConfig
from benchmarks.links.figure import draw_schedules, draw_sweep
from benchmarks.links.measure import Meter
from benchmarks.links.points import Point, PointsFile, Task
from benchmarks.links.tasks import all_tasks
from benchmarks.links.workload import Run
from benchmarks.provenance import plain_settings, versions
from thinpipe.core.units import format_duration_ceil

GUESSED_SECONDS_PER_BLOCK = 0.004
"""A micro-batch through a block and back, for the first estimate of the time left; what is measured corrects it."""
GUESSED_START_SECONDS = 2.0


def run(config: LinksConfig) -> None:
    """Prints where each point went as it comes, and the summary at the end."""
    config.output.mkdir(parents=True, exist_ok=True)
    file = PointsFile(config.output / "points.jsonl")
    tasks = all_tasks(config)
    measure_missing(tasks, file)
    points = [file.points[task.key] for task in tasks]
    page = write_results(config, points)
    print(page)


def measure_missing(tasks: Sequence[Task], file: PointsFile) -> None:
    missing = [task for task in tasks if task.key not in file.points]
    if len(missing) < len(tasks):
        _say(f"{len(tasks) - len(missing)} of {len(tasks)} points are in {file.path} already")
    started, done_cost, cost_left = time.monotonic(), 0.0, sum(map(_guessed_seconds, missing))
    with Meter() as meter:
        for index, task in enumerate(missing):
            spent = time.monotonic() - started
            left = cost_left * (spent / done_cost if done_cost else 1.0)
            _say(f"[{index + 1}/{len(missing)}] {task.part}: {task.name}; about {format_duration_ceil(left)} left")
            point = meter.measure(task)
            file.add(point)
            _say(f"      {_in_short(point)}")
            done_cost, cost_left = done_cost + _guessed_seconds(task), cost_left - _guessed_seconds(task)


def write_results(config: LinksConfig, points: Sequence[Point]) -> str:
    """links.json, links.md and the figures; returns the page."""
    engine, ratio = links_results.engine_rows(points), links_results.ratio_rows(points)
    methods, sweep = links_results.sweep_rows(points)
    schedules = links_results.schedule_rows(points)
    sections: list[str] = [f"# python -m benchmarks.links\n\n{_facts_text(config)}"]
    if engine:
        sections += links_summary.engine_section(engine)
    if sweep:
        sections += [*links_summary.sweep_section(methods, sweep), "![sweep](sweep.png)"]
        draw_sweep(methods, sweep, config.output / "sweep.png")
    if ratio:
        sections += links_summary.ratio_section(ratio)
    if schedules:
        sections += [*links_summary.schedules_section(schedules), "![schedules](schedules.png)"]
        draw_schedules(schedules, config.output / "schedules.png")
    page = "\n\n".join(sections) + "\n"
    (config.output / "links.md").write_text(page, encoding="utf-8")
    result = {
        "bench": "links",
        "config": plain_settings(config),
        "versions": _facts(),
        "engine": [_with(row, reached=row.reached) for row in engine],
        "methods": [_with(row) for row in methods],
        "sweep": [_with(row, bound=row.bound, ratio=row.ratio, reached=row.reached) for row in sweep],
        "ratio": [_with(row, reached=row.reached) for row in ratio],
        "schedules": [_with(row) for row in schedules],
        "points": msgspec.to_builtins(list(points)),
    }
    (config.output / "links.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return page


def _facts() -> dict[str, str | int]:
    return {**versions(), "cores": os.cpu_count() or 0}


def _facts_text(config: LinksConfig) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in _facts().items())
    return f"{facts}; {config.threads} thread{'s' if config.threads > 1 else ''} per process."


def _with(row: Any, **more: object) -> dict[str, Any]:
    """The row's fields and what follows from them."""
    fields = {name: value for name, value in vars(row).items() if name != "point"}  # points are in the file anyway
    plain: dict[str, Any] = msgspec.to_builtins(fields | more)
    return plain


def _in_short(point: Point) -> str:
    """For the progress line."""
    task, parts = point.task, []
    for each, times in zip(task.runs, point.times, strict=True):
        speed = links_results.tokens_per_second(each, times.seconds)
        bound = link_bound_seconds(each)
        limit = f" (the link allows {each.shape.step_tokens / bound:,.0f})" if bound else ""
        name = "bare" if each.bare else each.link.text
        parts.append(f"{each.method}, {each.schedule_text}, {name}: {speed:,.0f} tokens/s{limit}")
    if point.memory:
        parts = [f"peak MiB by process: {', '.join(str(m.peak_nbytes >> 20) for m in point.memory)}"]
    return "; ".join(parts)


def _guessed_seconds(task: Task) -> float:
    steps: Iterable[tuple[Run, int]] = zip(task.runs, task.counts, strict=True)
    return GUESSED_START_SECONDS + sum(_guessed_step(run) * (count + 1) for run, count in steps)


def _guessed_step(run: Run) -> float:
    blocks = run.shape.blocks_per_stage * run.shape.stages * run.shape.microbatches
    return max(link_bound_seconds(run), blocks * GUESSED_SECONDS_PER_BLOCK)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(run_benchmark("links", LinksConfig, run))
