"""Carries runs out: `thinpipe train` in one process at one thread, several side by side, each resumable by itself."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.convergence.study import Study, trainable
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml, from_table
from thinpipe.core.errors import UserError
from thinpipe.core.events import Stopped, read_events
from thinpipe.core.files import write_atomically
from thinpipe.core.run_folder import events_path
from thinpipe.report.summary import summarise

STATUS_SECONDS = 60.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
KEEP_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
"""For glibc: large tensors of one step are the memory of the next one, a fifth faster than asking the kernel again."""

_RENAMED = {
    "neck": "projection",
    "anchor_rank": "token_prior_rank",
    "anchor_reach": "token_prior_window",
    "first_rank": "embedding_rank",
    "ngram_rows": "bigram_rows",
    "ngram_rank": "bigram_rank",
    "memory": "feedback",
    "line_share": "uplink_share",
}
"""Settings in committed records -> their names today. No name stands for two settings."""
_RECIPES = {("float32", False): "fp32", ("float32", True): "bf16-mixed"}
"""(data type, autocast) in committed records -> `training.precision` today."""


class Run(Protocol):
    """What can be carried out; `Study` is one."""

    @property
    def key(self) -> str: ...

    @property
    def steps(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def trunk(self) -> "Run | None":
        """The run whose last step this one goes on from."""
        ...

    def config(self, data: Path, folder: Path) -> RunConfig: ...


Record = Callable[[Any, Path], dict[str, Any]]
"""From a run and its folder to what is kept of it; `validations` is a list, its last entry has a `loss`."""


@dataclass
class Running:
    study: Run
    folder: Path
    process: subprocess.Popen[bytes]
    first_step: int

    @property
    def step(self) -> int:
        return steps_done(self.folder)


def steps_done(folder: Path) -> int:
    log = events_path(folder)
    return max((getattr(event, "step", 0) for event in read_events(log)), default=0) if log.is_file() else 0


def ended(folder: Path) -> str | None:
    """Why the run is over for good: it came to its last step, or its loss is not finite any more."""
    log = events_path(folder)
    reasons = [event.reason for event in read_events(log) if isinstance(event, Stopped)] if log.is_file() else []
    return reasons[-1] if reasons and reasons[-1] in ("finished", "not_finite") else None


def settings_of(run: Run) -> str:
    """What makes a record that of this run."""
    return dump_toml(run.config(Path("TOKENS"), Path("RUN")))


def start(study: Run, data: Path, work: Path) -> Running:
    folder = work / study.key
    settings, wanted = folder / "wanted.toml", dump_toml(study.config(data, folder))
    if settings.is_file() and settings.read_text() != wanted:
        shutil.rmtree(folder)  # begun with other settings: not the run that is asked for
    folder.mkdir(parents=True, exist_ok=True)
    if study.trunk is not None and not (folder / "checkpoints").exists():
        branch_off(study.trunk, folder, work)
    settings.write_text(wanted)
    with (folder / "console.log").open("ab") as console:
        process = subprocess.Popen(
            [sys.executable, "-m", "thinpipe", "train", str(settings)],
            env=os.environ | ONE_THREAD | KEEP_FREED_MEMORY,
            stdout=console,
            stderr=console,
            start_new_session=True,  # Ctrl+C reaches this process alone, which then asks each run to stop, once
        )
    return Running(study, folder, process, steps_done(folder))


def branch_off(trunk: Run, folder: Path, work: Path) -> None:
    """So that a run goes on where its trunk ended."""
    grown = work / trunk.key / "checkpoints"
    if ended(grown.parent) != "finished":
        raise UserError(f"{folder.name} goes on from {trunk.key}, which is not there: remove the record of that one")
    half = folder / "branching"
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(grown, half)
    half.rename(folder / "checkpoints")


def record(study: Study, folder: Path) -> dict[str, Any]:
    """All that a run left behind, small enough to keep: settings, every loss, every change of basis."""
    summary = summarise(folder)
    last = summary.steps[-1]
    return {
        "question": study.question,
        "name": study.name,
        "kind": study.kind,
        "ended": ended(folder),
        "lr": study.lr,
        "seed": study.seed,
        "tokens": study.tokens,
        "tokens_reached": last.tokens,
        "boundaries": len(study.cuts),
        "bytes_per_token": study.nbytes_per_token,
        "trainable": trainable(study.model),
        "settings": settings_of(study),
        "versions": summary.starts[-1].versions,
        "starts": len(summary.starts),
        "seconds": round(summary.seconds, 1),
        "skipped": len(summary.skipped),
        "validations": [
            {"tokens": event.step * study.tokens_per_step, "loss": event.loss, "bits_per_byte": event.bits_per_byte}
            for event in summary.validations
        ],
        "basis_changes": [
            {
                "step": event.step,
                "captured_energy": event.captured_energy,
                "largest_angle": event.largest_angle,
                "mean_angle": event.mean_angle,
                "kept_norm": event.kept_norm,
                "loss_before": event.loss_before,
                "loss_after": event.loss_after,
            }
            for event in summary.basis_changes
        ],
        "training_loss": [round(step.loss, 4) for step in summary.steps],
    }


def result_path(study: Run, output: Path) -> Path:
    return output / "records" / f"{study.key}.json"


def is_done(run: Run, output: Path) -> bool:
    """There is a record of it, made with the same settings."""
    path = result_path(run, output)
    return path.is_file() and has_settings(run, json.loads(path.read_text())["settings"], where=path)


def has_settings(run: Run, text: str, *, where: Path) -> bool:
    """The TOML `text` of a record says what this run would say. Settings newer than the record have their defaults."""
    if text == settings_of(run):
        return True
    table = current_settings(tomllib.loads(text))
    return from_table(table, RunConfig, where=str(where)) == run.config(Path("TOKENS"), Path("RUN"))


def current_settings(table: dict[str, Any]) -> dict[str, Any]:
    """The settings of a record under today's names."""
    settings = _renamed(table)
    if "dtype" in settings.get("training", {}):  # data type and autocast were settings of their own
        execution, training = settings["execution"], settings["training"]
        training["precision"] = _RECIPES[training.pop("dtype"), execution.pop("autocast_bf16")]
        execution["checkpoint_activations"] = "block" if execution["checkpoint_activations"] else "none"
    return settings


def _renamed(table: dict[str, Any]) -> dict[str, Any]:
    renamed = {_RENAMED.get(key, key): value for key, value in table.items()}
    return {key: _renamed(value) if isinstance(value, dict) else value for key, value in renamed.items()}


def keep(study: Run, folder: Path, output: Path, record_of: Record) -> float | None:
    """Writes the record; the last validation loss."""
    kept = record_of(study, folder)
    path = result_path(study, output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(kept) + "\n").encode())
    finished = kept["ended"] == "finished" and kept["validations"]
    return kept["validations"][-1]["loss"] if finished else None


@contextmanager
def folder_lock(work: Path) -> Iterator[None]:
    """Holds an exclusive lock on the work folder: two studies in one folder would write into each other's runs."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another study is at work in {work}: wait for it, or give another --work") from None
        yield


def execute(
    studies: Sequence[Run],
    data: Path,
    work: Path,
    output: Path,
    *,
    side_by_side: int,
    record_of: Record = record,
    time_is_over: Callable[[], bool] = lambda: False,
) -> int:
    """Carries out what has no record yet, by priority; the number of runs that failed.

    Once `time_is_over` returns True, no run is started, and those that compute are asked to save and stop.
    """
    waiting = [study for study in studies if not is_done(study, output)]
    trunks = {study.trunk.key for study in studies if study.trunk}
    todo = sum(study.steps - min(study.steps, steps_done(work / study.key)) for study in waiting)
    million_tokens = sum(study.tokens for study in waiting) / 1e6
    running, done, failed, began, reported = list[Running](), 0, 0, time.monotonic(), 0.0
    print(f"{len(waiting)} of {len(studies)} runs to do, {million_tokens:.1f} M tokens", flush=True)
    with folder_lock(work):
        try:
            while (waiting or running) and not time_is_over():
                while len(running) < side_by_side and (study := _next(waiting, running)):
                    waiting.remove(study)
                    running.append(start(study, data, work))
                time.sleep(0.5)
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    settled = _settle(run, output, record_of)
                    failed += not settled
                    if settled and run.study.key not in trunks:
                        shutil.rmtree(run.folder)
                    done += run.study.steps - run.first_step
                if time.monotonic() - reported > STATUS_SECONDS:
                    reported = time.monotonic()
                    now = done + sum(max(0, run.step - run.first_step) for run in running)
                    _report_progress(
                        running, len(waiting), steps_left=todo - now, steps_per_second=now / (reported - began)
                    )
        finally:
            for run in running:
                run.process.terminate()  # it saves a checkpoint and goes on from there the next time
            for run in running:
                with suppress(subprocess.TimeoutExpired):
                    run.process.wait(timeout=60)
    return failed


def _next(waiting: Sequence[Run], running: Sequence[Running]) -> Run | None:
    """The first whose trunk, if it has one, need not be waited for."""
    unfinished = {study.key for study in (*waiting, *(run.study for run in running))}
    for study in waiting:
        if not (study.trunk and study.trunk.key in unfinished):
            return study
    return None


def _settle(run: Running, output: Path, record_of: Record) -> bool:
    """Keeps what an ended run came to, or says why there is nothing to keep."""
    if ended(run.folder) is None:
        tail = (run.folder / "console.log").read_text()[-400:]
        print(f"{run.study.key} failed; the end of its output:\n{tail}", flush=True)
        return False
    loss = keep(run.study, run.folder, output, record_of)
    print(f"{run.study.key}: " + ("diverged" if loss is None else f"validation loss {loss:.4f}"), flush=True)
    return True


def _report_progress(running: Sequence[Running], waiting: int, *, steps_left: int, steps_per_second: float) -> None:
    left = f"{steps_left / steps_per_second / 60:.0f} min left" if steps_per_second else "no estimate yet"
    names = "; ".join(f"{run.study.key} {run.step}/{run.study.steps}" for run in running)
    print(f"{steps_per_second:.2f} steps/s, {left}, {waiting} waiting: {names}", flush=True)
