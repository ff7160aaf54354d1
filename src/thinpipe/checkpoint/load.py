"""Loading by path: finds a checkpoint by run folder or checkpoint folder, and loads the model for inference."""

from collections.abc import Collection
from pathlib import Path

import torch

from thinpipe.checkpoint.state import model_config_of, restore
from thinpipe.checkpoint.storage import Checkpoint, CheckpointFolder
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import MANIFEST, checkpoints_path
from thinpipe.models import Model, build, materialise


def find_checkpoint(path: Path, layers: Collection[str] | None = None) -> Checkpoint:
    """The checkpoint at `path`, or the newest intact one of the run folder `path`. Raises UserError if there is none.

    `layers`: layers to verify; None: all.
    """
    if (path / MANIFEST).is_file():
        return Checkpoint.open(path, layers)
    checkpoint, problems = CheckpointFolder(checkpoints_path(path)).newest_complete(layers)
    if checkpoint is None:
        reasons = "".join(f"\n  {problem}" for problem in problems)
        raise UserError(f"there is no checkpoint in {path}: name the dump_folder of a run, or one checkpoint{reasons}")
    return checkpoint


def run_folder_of(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.parent.parent


def load_model(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Model:
    """The model in eval mode, without training state."""
    weights = checkpoint.layer("last")
    dtype = next(tensor.dtype for name, tensor in weights.items() if ":" not in name)
    model = materialise(build(model_config_of(checkpoint)), seed=0, device=device, dtype=dtype, draw=False)
    restore(checkpoint, dict(model.named_parameters()), model.space)
    return model.eval()
