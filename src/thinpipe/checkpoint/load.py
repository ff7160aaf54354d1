"""Opens what a person names: the folder of a run, or one checkpoint."""

from collections.abc import Collection
from pathlib import Path

import torch

from thinpipe.checkpoint.folder import MANIFEST, Checkpoint, CheckpointFolder
from thinpipe.checkpoint.state import model_config_of, restore
from thinpipe.core.errors import UserError
from thinpipe.models import Model, build, materialise


def find_checkpoint(path: Path, layers: Collection[str] | None = None) -> Checkpoint:
    """The named checkpoint, or the newest whole one of the named run; whole as far as these layers go."""
    if (path / MANIFEST).is_file():
        return Checkpoint.open(path, layers)
    checkpoint, problems = CheckpointFolder(path / "checkpoints").newest_whole(layers)
    if checkpoint is None:
        reasons = "".join(f"\n  {problem}" for problem in problems)
        raise UserError(f"there is no checkpoint in {path}: name the dump_folder of a run, or one checkpoint{reasons}")
    return checkpoint


def run_folder_of(checkpoint: Checkpoint) -> Path:
    return checkpoint.path.parent.parent


def load_model(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Model:
    """The model alone, for everything but training."""
    weights = checkpoint.layer("last")
    dtype = next(tensor.dtype for name, tensor in weights.items() if ":" not in name)
    model = materialise(build(model_config_of(checkpoint)), seed=0, device=device, dtype=dtype, draw=False)
    restore(checkpoint, dict(model.named_parameters()), model.space)
    return model.eval()
