"""What is kept of a finished run: settings, losses, and one more evaluation in which every state crosses whole."""

import hashlib
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.convergence.execute import ended, is_done, result_path, settings_of
from benchmarks.finetune.runs import BOOKS_FOLDER, EPOCHS, METHODS, PRETRAINED, Finetuning, Pretraining
from benchmarks.finetune.stamp import read_stamp
from thinpipe.checkpoint import find_checkpoint
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import load_toml
from thinpipe.core.errors import UserError
from thinpipe.report.summary import Summary, summarise
from thinpipe.training.trainer import Trainer


def record(run: Finetuning, folder: Path) -> dict[str, Any]:
    """`on` and `off` are the losses after the last step with what training sends and with whole states; None: diverged.

    Validations that were not finite are not among those of the summary, so the last of these may be an earlier one.
    """
    summary, why = summarise(folder), ended(folder)
    after = {event.step: event.loss for event in summary.validations}
    finished = why == "finished"
    return {
        "name": run.name,
        "seed": run.seed,
        "lr": run.lr,
        "ended": why,
        "on": after.get(run.steps) if finished else None,
        "off": finite(loss_whole(load_toml(folder / "run.toml", RunConfig), folder)) if finished else None,
        "forward_nbytes": run.forward_nbytes,
        "backward_nbytes": run.backward_nbytes,
        "paper_forward_nbytes": run.paper_forward_nbytes,
        "initial_sha256": weights_sha256(folder.parent / PRETRAINED),
        "settings": settings_of(run),
        **facts_of(summary),
        "validations": [{"epoch": step * EPOCHS / run.steps, "loss": loss} for step, loss in after.items()],
    }


def record_pretraining(run: Pretraining, folder: Path) -> dict[str, Any]:
    """`before` is the loss of the weights on the books. Last, puts them where every fine-tuning looks for them.

    Whatever happens before the record is written, the run is still there and this can be done again.
    """
    why = ended(folder)
    if why != "finished":
        raise UserError(f"the pretraining ended with {why}, so there are no weights to fine-tune: look at {folder}")
    target = folder.parent / PRETRAINED
    partial = target.with_name(f".{PRETRAINED}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder / "checkpoints", partial / "checkpoints")
    summary = summarise(folder)
    start = Finetuning(name="uncompressed", boundary=METHODS["uncompressed"]).config(
        folder.parent / BOOKS_FOLDER, folder
    )
    kept = {
        "ended": why,
        "before": loss_whole(replace(start, model=replace(start.model, initial=partial)), partial),
        "initial_sha256": weights_sha256(partial),
        "settings": settings_of(run),
        "stamp": read_stamp(folder.parent),
        **facts_of(summary),
        "validations": [{"step": event.step, "loss": event.loss} for event in summary.validations],
    }
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
    return kept


def has_pretrained(work: Path, output: Path) -> bool:
    """The weights and the record, and both of one run."""
    if not is_done(Pretraining(), output) or not (work / PRETRAINED).is_dir():
        return False
    kept = json.loads(result_path(Pretraining(), output).read_text())
    return bool(kept["initial_sha256"] == weights_sha256(work / PRETRAINED))


def facts_of(summary: Summary) -> dict[str, Any]:
    """What every record of a run has: its size, versions, time and training losses."""
    return {
        "tokens": summary.steps[-1].tokens,
        "parameters": summary.starts[-1].parameters,
        "versions": summary.starts[-1].versions,
        "starts": len(summary.starts),
        "seconds": round(summary.seconds, 1),
        "skipped": len(summary.skipped),
        "training_loss": [round(step.loss, 4) for step in summary.steps],
    }


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


def loss_whole(config: RunConfig, weights: Path) -> float:
    """The validation loss of a run's weights with its settings, when nothing is compressed."""
    trainer = Trainer(replace(config, boundary=BoundaryConfig()))
    trainer.engine.start_from(find_checkpoint(weights, trainer.engine.layers))
    return trainer.engine.evaluate(trainer.batch_loader.validation_batches())[0]


def weights_sha256(folder: Path) -> str:
    """Runs can be compared if they started from the same weights."""
    return hashlib.sha256(msgspec.json.encode(find_checkpoint(folder, ()).manifest.files)).hexdigest()
