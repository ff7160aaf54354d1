"""Checkpoints: one safetensors file per layer and a manifest, whole or absent. No pickle.

`folder` knows files and nothing of models; `state` knows what a model, its optimiser and its basis have to keep,
`memories` what its boundaries do.
"""

from thinpipe.checkpoint.folder import Checkpoint, CheckpointFolder, Manifest
from thinpipe.checkpoint.load import find_checkpoint, load_model, run_folder_of
from thinpipe.checkpoint.memories import memories, restore_memories
from thinpipe.checkpoint.state import describe, layers_of, model_config_of, restore, state_by_layer

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "Manifest",
    "describe",
    "find_checkpoint",
    "layers_of",
    "load_model",
    "memories",
    "model_config_of",
    "restore",
    "restore_memories",
    "run_folder_of",
    "state_by_layer",
]
