"""What is kept of a finished run of the study: settings, losses, time, and the weights that a tuning started from."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.convergence.execute import ended, is_done, result_path, settings_of
from benchmarks.finetune.record import facts_of, finite, loss_whole, weights_sha256
from benchmarks.tuning_boundaries.channels import largest_channels
from benchmarks.tuning_boundaries.runs import BASE_FOLDER, BOUNDARIES, TASK_FOLDER, WHOLE, Base, Tuning
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import file_sha256
from thinpipe.data.manifest import MANIFEST_NAME
from thinpipe.report.summary import summarise


def record(run: Tuning, folder: Path) -> dict[str, Any]:
    """`loss` is that of the last validation, which sends what training sends; `loss_whole` is measured once more with
    fp32 boundaries. None: diverged."""
    summary, why = summarise(folder), ended(folder)
    after = {event.step: event.loss for event in summary.validations}
    finished = why == "finished"
    forward, backward = run.nbytes_per_token
    return {
        "name": run.name,
        "seed": run.seed,
        "lr": run.lr,
        "ended": why,
        "loss": after.get(run.steps) if finished else None,
        "loss_whole": finite(loss_whole(load_toml(folder / "run.toml", RunConfig), folder)) if finished else None,
        "forward_nbytes": forward,
        "backward_nbytes": backward,
        "initial_sha256": weights_sha256(folder.parent / BASE_FOLDER),
        "settings": settings_of(run),
        **facts_of(summary),
        "validations": [{"step": step, "loss": loss} for step, loss in after.items()],
    }


def record_base(run: Base, folder: Path) -> dict[str, Any]:
    """`before` is the loss of the base on the task. Last, puts the weights where every tuning looks for them."""
    why = ended(folder)
    if why != "finished":
        raise UserError(f"the base ended with {why}, so there is nothing to tune: look at {folder}")
    work = folder.parent
    target, partial = work / BASE_FOLDER, work / f".{BASE_FOLDER}"
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder / "checkpoints", partial / "checkpoints")
    summary = summarise(folder)
    start = Tuning(name=WHOLE, boundary=BOUNDARIES[WHOLE], sizes=run.sizes).config(work / TASK_FOLDER, folder)
    start = replace(start, model=replace(start.model, initial=partial))
    kept = {
        "ended": why,
        "before": loss_whole(start, partial),
        "largest_channels": largest_channels(start, partial),
        "initial_sha256": weights_sha256(partial),
        "data_sha256": data_sha256(load_toml(folder / "run.toml", RunConfig).data.path),
        "settings": settings_of(run),
        **facts_of(summary),
        "validations": [{"step": event.step, "loss": event.loss} for event in summary.validations],
    }
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return kept


def data_sha256(data: Path | None) -> str:
    """Of the manifest of the books, which has the hashes of all shards and of the tokenizer."""
    path = (data or Path()) / "train" / MANIFEST_NAME
    if not path.is_file():
        raise UserError(f"{path} does not exist: name a folder made by `thinpipe tokenize --validation-sources`")
    return file_sha256(path)


def has_base(base: Base, data: Path, work: Path, output: Path) -> bool:
    """The record and the weights, both of one run. Raises UserError if the record is of other books."""
    if not is_done(base, output):
        return False
    kept = json.loads(result_path(base, output).read_text())
    if kept["data_sha256"] != data_sha256(data):
        raise UserError(f"the base in {output} was trained on other tokens than {data}: name another --output")
    weights = work / BASE_FOLDER
    return weights.is_dir() and bool(kept["initial_sha256"] == weights_sha256(weights))


def refuse_other_bases(runs: Sequence[Tuning], work: Path, output: Path) -> None:
    """Raises UserError for a record whose tuning started from other weights than those in the work folder."""
    initial = weights_sha256(work / BASE_FOLDER)
    for path in (result_path(run, output) for run in runs if is_done(run, output)):
        if json.loads(path.read_text())["initial_sha256"] != initial:
            raise UserError(f"{path} started from another base than {work} has: remove it, or name another --output")
