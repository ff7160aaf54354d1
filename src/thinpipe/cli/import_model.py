"""`thinpipe import`: converts a Hugging Face folder to a subspace model, as a checkpoint to train from. The change in
loss is measured and printed."""

import logging
from itertools import islice
from pathlib import Path

from thinpipe.checkpoint import CheckpointFolder, new_manifest, state_by_layer
from thinpipe.config.commands import ImportConfig
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.data import Tokenizer, Tokens, has_tokens, sequential_batches
from thinpipe.models import Model, SubspaceConfig, build, materialise
from thinpipe.models.hf import weights
from thinpipe.models.to_subspace import to_subspace
from thinpipe.training.mean_loss import mean_loss

MEASURED_BATCHES = 50
_LOG = logging.getLogger(__name__)


def run(config: ImportConfig) -> int:
    if checkpoints_path(config.output).exists():
        raise UserError(f"{config.output} already has checkpoints: choose another folder")
    dense = materialise(build(weights.load_config(config.source)), seed=0, draw=False)
    weights.load_weights(dense, config.source)
    # "given" preserves the embedding exactly: the frozen table is the embedding minus its part in the subspace.
    subspace = SubspaceConfig(width=config.subspace_width, fixed="given", free_last=config.free_last)
    model = _convert(dense, subspace, config.boundaries, config.data)
    layers = state_by_layer(dict(model.named_parameters()), model.space)
    checkpoint = CheckpointFolder(checkpoints_path(config.output)).save(new_manifest(model), layers)
    if (config.source / "tokenizer.json").is_file():
        Tokenizer.load(config.source).save(config.output / "tokenizer")
    else:
        _LOG.warning("%s has no tokenizer.json: %s has no tokenizer", config.source, config.output)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{config.output}: {checkpoint.manifest.family}, {parameters:,} trainable parameters")
    print(f"  thinpipe train RUN.toml --model.initial {config.output}")
    return 0


def _convert(dense: Model, subspace: SubspaceConfig, boundaries: tuple[int, ...], data: Path) -> Model:
    subspace_model, report = to_subspace(dense, subspace, boundaries)
    folder = data / "validation"
    tokens = Tokens(folder if has_tokens(folder) else data / "train")
    losses = [_loss(model, tokens) for model in (dense, subspace_model)]
    print(
        f"converted to {subspace.width} of {dense.config.dim} dimensions: the layers that write to "
        f"the residual stream retain {report.retained:.1%} of their squared norm; loss {losses[0]:.4f} -> "
        f"{losses[1]:.4f} nats per token before any training"
    )
    return subspace_model


def _loss(model: Model, tokens: Tokens) -> float:
    batches = sequential_batches(tokens, seq_len=min(256, model.config.max_seq_len), batch_size=4)
    measured = (ids for ids, _ in islice(batches, MEASURED_BATCHES))
    return mean_loss(model.eval(), measured, "cpu", chats=tokens.manifest.is_chat)[0]
