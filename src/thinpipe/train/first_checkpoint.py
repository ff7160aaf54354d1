"""The checkpoint of step 0 that a hub gives to its peers: first weights and basis, made once, on one machine.

Made segment by segment: the hub need not have the memory for the model.
"""

import msgspec
import torch

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, describe, find_checkpoint, state_by_layer
from thinpipe.checkpoint.folder import FileEntry, layer_of
from thinpipe.checkpoint.state import versions
from thinpipe.core.config import dump_toml
from thinpipe.models import build, materialise
from thinpipe.train.config import RunConfig
from thinpipe.train.tokens import DataFacts


def make_first_checkpoint(config: RunConfig, facts: DataFacts, folder: CheckpointFolder) -> Checkpoint:
    if config.model.initial is not None:
        return _from_another(config, facts, folder, find_checkpoint(config.model.initial))
    model_config = config.model.resolve(facts.vocab_size)
    dtype: torch.dtype = getattr(torch, config.training.dtype)
    folder.begin(0)
    files: dict[str, FileEntry] = {}
    for index in range(len(model_config.segments)):
        model = build(model_config)
        segment = materialise(model.segments[index], seed=config.debug.seed, dtype=dtype)
        space = model.space if index == 0 else None
        files |= folder.write(0, state_by_layer(dict(segment.named_parameters()), space))
        if index == 0:
            manifest = describe(model, data_sha256=facts.sha256, run=dump_toml(config))
    return folder.commit(manifest, files)


def _from_another(config: RunConfig, facts: DataFacts, folder: CheckpointFolder, other: Checkpoint) -> Checkpoint:
    """Its weights and basis; all else begins anew."""
    layers = [layer_of(name) for name in other.manifest.files]
    folder.begin(0)
    files: dict[str, FileEntry] = {}
    for layer in layers:
        if not layer.startswith("boundary."):
            weights = {name: tensor for name, tensor in other.layer(layer).items() if ":" not in name}
            files |= folder.write(0, {layer: weights})
    manifest = msgspec.structs.replace(
        other.manifest, step=0, samples_seen=0, data_sha256=facts.sha256, run=dump_toml(config), versions=versions()
    )
    return folder.commit(manifest, files)
