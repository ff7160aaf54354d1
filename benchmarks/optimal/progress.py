"""The state of the study: which runs are done, core-hours spent and left, and what comes next."""

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.execute import is_done, result_path
from benchmarks.optimal.queue import next_unfinished
from benchmarks.optimal.runs import WidthRun
from thinpipe.core.files import write_atomically


def progress_page(runs: Sequence[WidthRun], output: Path) -> str:
    done = {run.key for run in runs if is_done(run, output)}
    spent = sum(_seconds(run, output) for run in runs if run.key in done) / 3600
    left = sum(run.core_hours for run in runs if run.key not in done)
    following = next_unfinished(runs, output)
    lines = [
        "# Progress",
        "",
        f"{len(done)} of {len(runs)} runs are done. Core-hours: {spent:.1f} spent on them, about {left:.1f} left.",
        "Next: " + (f"{following.key}." if following else "nothing, the list is complete."),
        "",
        "| question | run | lr | seed | M tokens | times fewer bytes | core-hours | |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for run in runs:
        is_finished = run.key in done
        hours = _seconds(run, output) / 3600 if is_finished else run.core_hours
        lines.append(
            f"| {run.question} | {run.name} | {run.lr:g} | {run.seed} | {run.tokens / 1e6:.2f} | "
            f"{run.fewer_bytes:.1f} | {hours:.2f} | {'done' if is_finished else 'open'} |"
        )
    return "\n".join([*lines, "", "Core-hours of open runs are estimates.", ""])


def write_progress(runs: Sequence[WidthRun], output: Path) -> None:
    """Writes OUTPUT/progress.md."""
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "progress.md", progress_page(runs, output).encode())


def _seconds(run: WidthRun, output: Path) -> float:
    seconds: float = json.loads(result_path(run, output).read_text()).get("seconds", 0.0)
    return seconds
