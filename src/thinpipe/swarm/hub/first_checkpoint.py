"""Creates the checkpoint of step 0 from which all peers start: initial weights and basis, made on one machine.

That of a Hugging Face model has the hash of its base and no weights: peers have the base from elsewhere, and draw
adapters.

Built segment by segment, so that the hub need not hold the whole model in memory.
"""

from typing import TYPE_CHECKING

import msgspec
import torch

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, find_checkpoint, new_manifest, state_by_layer
from thinpipe.checkpoint.state import versions
from thinpipe.checkpoint.storage import FileEntry, layer_of
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.models import build, materialise
from thinpipe.models.protocol import build_model
from thinpipe.training.data_loading import DatasetInfo

if TYPE_CHECKING:
    from thinpipe.swarm.hub.served_base import ServedBase


def make_first_checkpoint(
    config: RunConfig, dataset_info: DatasetInfo, folder: CheckpointFolder, base: "ServedBase | None" = None
) -> Checkpoint:
    """Writes the checkpoint of step 0: fresh weights, those of `model.initial` if it is set, or the hash of a base."""
    if base is not None:
        return _from_base(config, dataset_info, folder, base)
    if config.model.initial is not None:
        return _from_checkpoint(config, dataset_info, folder, find_checkpoint(config.model.initial))
    model_config = config.model.resolve(dataset_info.vocab_size)
    dtype: torch.dtype = getattr(torch, config.planned_recipe.weights)
    folder.begin(0)
    files: dict[str, FileEntry] = {}
    for index in range(len(model_config.segments)):
        model = build(model_config)
        segment = materialise(model.segments[index], seed=config.debug.seed, dtype=dtype)
        space = model.space if index == 0 else None
        files |= folder.write(0, state_by_layer(dict(segment.named_parameters()), space))
        if index == 0:
            manifest = new_manifest(model, data_sha256=dataset_info.sha256, run=dump_toml(config))
    return folder.commit(manifest, files)


def _from_base(
    config: RunConfig, dataset_info: DatasetInfo, folder: CheckpointFolder, base: "ServedBase"
) -> Checkpoint:
    model = build_model(base.model)
    folder.begin(0)
    files = folder.write(0, state_by_layer({}, model.space))
    manifest = new_manifest(
        model, data_sha256=dataset_info.sha256, run=dump_toml(config), base_sha256=base.statement.base_sha256
    )
    return folder.commit(manifest, files)


def _from_checkpoint(
    config: RunConfig, dataset_info: DatasetInfo, folder: CheckpointFolder, other: Checkpoint
) -> Checkpoint:
    """Takes weights and basis from another checkpoint; optimizer state, codec state and data position start afresh."""
    layers = [layer_of(name) for name in other.manifest.files]
    folder.begin(0)
    files: dict[str, FileEntry] = {}
    for layer in layers:
        if not layer.startswith("boundary."):
            weights = {name: tensor for name, tensor in other.layer(layer).items() if ":" not in name}
            files |= folder.write(0, {layer: weights})
    manifest = msgspec.structs.replace(
        other.manifest,
        step=0,
        samples_seen=0,
        data_sha256=dataset_info.sha256,
        run=dump_toml(config),
        versions=versions(),
    )
    return folder.commit(manifest, files)
