"""Carries trainings out, a few side by side at one thread each, and keeps a line of JSON for every finished one.

The pool pickles what it hands to its own processes, on this machine and never on the disk; nothing else does.
"""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
import torch

from benchmarks.images.settings import SETTINGS, Setting
from benchmarks.images.training import Outcome, Recipe, train
from thinpipe.core.files import write_atomically

SEEDS = (0, 1, 2)
Task = tuple[Setting, int]


def tasks(seeds: Sequence[int] = SEEDS, only: Sequence[str] = ()) -> list[Task]:
    """Seed by seed, so that a study that is stopped has something of everything. `only`: parts of names."""
    chosen = [setting for setting in SETTINGS if not only or any(part in setting.name for part in only)]
    return [(setting, seed) for seed in seeds for setting in chosen]


def results_path(output: Path) -> Path:
    return output / "images.jsonl"


def whole_lines(path: Path) -> list[bytes]:
    """Without a last one that was cut short."""
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    return [line for line in lines if line.endswith(b"\n")]


def read(output: Path, recipe: Recipe) -> list[Outcome]:
    """Of this recipe."""
    found = [msgspec.json.decode(line, type=Outcome) for line in whole_lines(results_path(output))]
    return [outcome for outcome in found if outcome.recipe == recipe]


def execute(wanted: Iterable[Task], recipe: Recipe, output: Path, *, side_by_side: int) -> None:
    done = {(outcome.setting, outcome.seed) for outcome in read(output, recipe)}
    waiting = [task for task in wanted if task not in done]
    output.mkdir(parents=True, exist_ok=True)
    write_atomically(results_path(output), b"".join(whole_lines(results_path(output))))
    began = time.monotonic()
    print(f"{len(waiting)} trainings to do, {len(done)} done before", flush=True)
    pool = ProcessPoolExecutor(side_by_side, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    with pool, results_path(output).open("ab") as file:
        try:
            futures = [pool.submit(train, setting, seed, recipe) for setting, seed in waiting]
            for count, future in enumerate(as_completed(futures), start=1):
                outcome = future.result()
                file.write(msgspec.json.encode(outcome) + b"\n")
                file.flush()
                left = (time.monotonic() - began) / count * (len(waiting) - count)
                print(f"{count}/{len(waiting)}, {left / 60:.1f} min left: {describe(outcome)}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def describe(outcome: Outcome) -> str:
    on, off = (
        f"loss {'not finite' if score.loss is None else f'{score.loss:.3f}'}, right {score.accuracy:.1%}"
        for score in (outcome.on, outcome.off)
    )
    return f"{outcome.setting.name}, seed {outcome.seed}: {on}; without compression {off}; {outcome.seconds:.1f} s"
