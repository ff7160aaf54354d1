"""Loading by path: finds a checkpoint by run folder or checkpoint folder, and loads the model for inference."""

import tomllib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from thinpipe.checkpoint.state import pipeline_config_of, refuse_other_base, restore
from thinpipe.checkpoint.storage import Checkpoint, CheckpointFolder
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import from_table
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import IDENTITY, MANIFEST, checkpoints_path, refuse_missing_run
from thinpipe.models import Model, build, materialise
from thinpipe.models.protocol import base_hashes, trainable_parameters

if TYPE_CHECKING:
    from thinpipe.models.hf.decoder import HuggingFaceModel


def find_checkpoint(path: Path, layers: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint at `path`, or the newest intact one of the run folder `path`. Raises UserError if there is none.

    `layers`: layers to verify; None: all.
    """
    refuse_missing_run(path)
    if (path / MANIFEST).is_file():
        return Checkpoint.open(path, layers)
    checkpoint, problems = CheckpointFolder(checkpoints_path(path)).newest_complete(layers)
    if checkpoint is None:
        if (path / IDENTITY).is_file():
            raise UserError(
                f"{path} has one machine's part of a run that it has joined: the whole model is at the hub, in the "
                "dump_folder of its run"
            )
        reasons = "".join(f"\n  {problem}" for problem in problems)
        raise UserError(f"there is no checkpoint in {path}: name the dump_folder of a run, or one checkpoint{reasons}")
    return checkpoint


def run_folder_of(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.parent.parent


def load_model(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> "Model | HuggingFaceModel":
    """The model in eval mode, without training state. Raises UserError."""
    config = pipeline_config_of(checkpoint)
    if isinstance(config, HuggingFaceModelConfig):
        return _load_huggingface(config, checkpoint, device)
    weights = checkpoint.layer("last")
    dtype = next(tensor.dtype for name, tensor in weights.items() if ":" not in name)
    model = materialise(build(config), seed=0, device=device, dtype=dtype, draw=False)
    restore(checkpoint, dict(model.named_parameters()), model.space)
    return model.eval()


def load_base(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> "HuggingFaceModel":
    """The Hugging Face model that a run began with, in eval mode. Raises UserError."""
    config = pipeline_config_of(checkpoint)
    if not isinstance(config, HuggingFaceModelConfig):
        raise UserError(f"{checkpoint.path} is of a model that began with random weights: it has no base (model.hf)")
    return _read_base(replace(config, lora=None), checkpoint, device).eval()


def _load_huggingface(
    config: HuggingFaceModelConfig, checkpoint: Checkpoint, device: torch.device | str
) -> "HuggingFaceModel":
    """The model in one segment, with the base as the run had it."""
    model = _read_base(config, checkpoint, device)
    restore(checkpoint, trainable_parameters(model), model.space)
    return model.eval()


def _read_base(
    config: HuggingFaceModelConfig, checkpoint: Checkpoint, device: torch.device | str
) -> "HuggingFaceModel":
    from thinpipe.models.hf.base_statement import base_sha256
    from thinpipe.models.hf.decoder import HuggingFaceModel  # transformers takes seconds to import

    model = HuggingFaceModel(config.uncut)
    for segment in model.segments:
        segment.materialise(seed=0, device=device, dtype=weights_dtype(checkpoint))
    refuse_other_base(config.source, base_sha256(base_hashes(model.segments)), checkpoint)
    return model


def weights_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Data type in which the run of a checkpoint has its weights, frozen ones included."""
    run = from_table(tomllib.loads(checkpoint.manifest.run), RunConfig, where=str(checkpoint.path))
    dtype: torch.dtype = getattr(torch, run.planned_recipe.weights)
    return dtype
