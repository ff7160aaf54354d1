"""What is kept of a finished run: settings, losses, and one more evaluation in which every state crosses whole."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.convergence.execute import ended
from benchmarks.finetune.runs import METHODS, PRETRAINED, Finetuning, Pretraining
from thinpipe.boundary.settings import BoundarySection
from thinpipe.checkpoint import find_checkpoint
from thinpipe.core.config import dump_toml, load_toml
from thinpipe.report.summary import Summary, summarise
from thinpipe.train.config import RunConfig
from thinpipe.train.loop import Trainer


def record(run: Finetuning, folder: Path) -> dict[str, Any]:
    """`on` and `off` are the last validation losses with what training sends and with whole states; None: diverged."""
    summary, finished = summarise(folder), ended(folder) == "finished"
    validations = [{"epoch": i, "loss": event.loss} for i, event in enumerate(summary.validations, 1)]
    return {
        "name": run.name,
        "seed": run.seed,
        "lr": run.lr,
        "on": validations[-1]["loss"] if finished else None,
        "off": loss_whole(load_toml(folder / "run.toml", RunConfig), folder) if finished else None,
        "forward_nbytes": run.forward_nbytes,
        "backward_nbytes": run.backward_nbytes,
        "paper_forward_nbytes": run.paper_forward_nbytes,
        "initial_sha256": weights_sha256(folder.parent / PRETRAINED),
        "settings": dump_toml(run.config(Path("BOOKS"), Path("RUNS/RUN"))),
        **_facts(summary),
        "validations": validations,
    }


def record_pretraining(run: Pretraining, folder: Path) -> dict[str, Any]:
    """Also puts the weights where every fine-tuning looks for them; `before` is their loss on the books."""
    target = folder.parent / PRETRAINED
    partial = target.with_name(f".{PRETRAINED}")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder / "checkpoints", partial / "checkpoints")
    partial.rename(target)
    summary = summarise(folder)
    start = Finetuning(name="uncompressed", boundary=METHODS["uncompressed"])
    return {
        "before": loss_whole(start.config(folder.parent / "books", folder), target),
        "initial_sha256": weights_sha256(target),
        "settings": dump_toml(run.config(Path("TOKENS"), Path("RUNS/RUN"))),
        **_facts(summary),
        "validations": [{"step": event.step, "loss": event.loss} for event in summary.validations],
    }


def _facts(summary: Summary) -> dict[str, Any]:
    return {
        "tokens": summary.steps[-1].tokens,
        "parameters": summary.starts[-1].parameters,
        "versions": summary.starts[-1].versions,
        "starts": len(summary.starts),
        "seconds": round(summary.seconds, 1),
        "skipped": len(summary.skipped),
        "training_loss": [round(step.loss, 4) for step in summary.steps],
    }


def loss_whole(config: RunConfig, weights: Path) -> float:
    """The validation loss of a run's weights with its settings, when nothing is compressed."""
    trainer = Trainer(replace(config, boundary=BoundarySection()))
    trainer.engine.start_from(find_checkpoint(weights, trainer.engine.layers))
    return trainer.engine.evaluate(trainer.feed.validation_batches())[0]


def weights_sha256(folder: Path) -> str:
    """Runs can be compared if they started from the same weights."""
    return hashlib.sha256(msgspec.json.encode(find_checkpoint(folder, ()).manifest.files)).hexdigest()
