"""Atomic checkpoints: one safetensors file per layer and a manifest. No pickle.

`storage` handles files and is independent of models; `state` maps model, optimizer and basis to layers; `codec_state`
does so for the codec state of boundary methods; `distributed` saves from all processes of a run.
"""

from thinpipe.checkpoint.codec_state import codec_states, restore_codec_states
from thinpipe.checkpoint.load import find_checkpoint, load_base, load_model, run_folder_of
from thinpipe.checkpoint.state import layers_of, model_config_of, new_manifest, restore, saved_beside, state_by_layer
from thinpipe.checkpoint.storage import Checkpoint, CheckpointFolder, Manifest

__all__ = [
    "Checkpoint",
    "CheckpointFolder",
    "Manifest",
    "codec_states",
    "find_checkpoint",
    "layers_of",
    "load_base",
    "load_model",
    "model_config_of",
    "new_manifest",
    "restore",
    "restore_codec_states",
    "run_folder_of",
    "saved_beside",
    "state_by_layer",
]
