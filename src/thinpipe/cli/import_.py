"""`thinpipe import`: a Hugging Face folder becomes a checkpoint to train from; a cast says what it costs."""

from dataclasses import replace
from itertools import islice
from pathlib import Path

from thinpipe.checkpoint import CheckpointFolder, describe, state_by_layer
from thinpipe.cli.settings import ImportConfig
from thinpipe.core.errors import UserError
from thinpipe.data import Tokenizer, Tokens, has_tokens, sequential_batches
from thinpipe.models import Model, SubspaceConfig, build, huggingface, materialise
from thinpipe.models.cast import cast
from thinpipe.train.engine import mean_loss

MEASURED_BATCHES = 50


def run(config: ImportConfig) -> int:
    if (config.output / "checkpoints").exists():
        raise UserError(f"{config.output} already holds checkpoints: name another folder")
    dense_config = huggingface.load_config(config.source)
    model = materialise(build(dense_config), seed=0, draw=False)
    huggingface.load_weights(model, config.source)
    if config.subspace_width is not None and config.data is not None:
        # The embedding is kept exactly: the frozen table is the given one, less its part in the subspace.
        subspace = SubspaceConfig(width=config.subspace_width, fixed="given", free_last=config.free_last)
        model = _cast(model, subspace, config.boundaries, config.data)
    elif config.boundaries:
        cut = materialise(build(replace(dense_config, boundaries=config.boundaries, tied=False)), seed=0, draw=False)
        huggingface.load_weights(cut, config.source)
        model = cut
    layers = state_by_layer(dict(model.named_parameters()), model.space)
    checkpoint = CheckpointFolder(config.output / "checkpoints").save(describe(model), layers)
    if (config.source / "tokenizer.json").is_file():
        Tokenizer.load(config.source).save(config.output / "tokenizer")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{config.output}: {checkpoint.manifest.family}, {parameters:,} trainable parameters")
    print(f"  thinpipe train RUN.toml --model.initial {config.output}")
    return 0


def _cast(dense: Model, subspace: SubspaceConfig, boundaries: tuple[int, ...], data: Path) -> Model:
    confined, report = cast(dense, subspace, boundaries)
    folder = data / "validation"
    tokens = Tokens(folder if has_tokens(folder) else data / "train")
    losses = [_loss(model, tokens) for model in (dense, confined)]
    print(
        f"cast into {subspace.width} of {dense.config.dim} dimensions: the writers keep "
        f"{report.kept:.1%} of their squared norm; loss {losses[0]:.4f} -> {losses[1]:.4f} nats before any training"
    )
    return confined


def _loss(model: Model, tokens: Tokens) -> float:
    batches = sequential_batches(tokens, seq_len=min(256, model.config.max_seq_len), batch_size=4)
    return mean_loss(model.eval(), (ids for ids, _ in islice(batches, MEASURED_BATCHES)), "cpu")[0]
