"""Model config of a run whose tokens and weights may not exist yet, guesses being returned as assumptions; and whether
the tokens are chats."""

from dataclasses import replace
from pathlib import Path

from thinpipe.config.families import PRESETS, read_model
from thinpipe.config.model import ModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import MANIFEST, checkpoints_path, step_folders
from thinpipe.data import has_tokens
from thinpipe.data.manifest import read_manifest


def resolve_model(config: RunConfig, vocab_size: int | None) -> tuple[ModelConfig, list[str]]:
    """Model config, and the assumptions made, one sentence each. Raises UserError."""
    assert config.model.hf is None
    if config.model.initial is not None:
        model = _model_of_checkpoint(config.model.initial)
        return (model if vocab_size is None else replace(model, vocab_size=vocab_size)), []
    if vocab_size is not None:
        return config.model.resolve(vocab_size), []
    tokens = config.data.folders[0] / "train"
    if has_tokens(tokens):
        size = read_manifest(tokens).vocabulary.size
        return config.model.resolve(size), [f"the vocabulary of {size:,} tokens in {tokens.parent} (--vocab-size)"]
    if config.model.preset not in PRESETS:
        raise UserError(f"model.preset {config.model.preset!r} is not one of: {', '.join(PRESETS)}")
    size = PRESETS[config.model.preset].vocab_size
    said = f"a vocabulary of {size:,} tokens, the preset's, since {tokens.parent} holds no tokens (--vocab-size)"
    return config.model.resolve(size), [said]


def has_chats(config: RunConfig) -> bool:
    """Whether the run's tokens are here and are chats, whose ids have flags. Raises UserError."""
    tokens = config.data.folders[0] / "train"
    return has_tokens(tokens) and read_manifest(tokens).is_chat


def _model_of_checkpoint(path: Path) -> ModelConfig:
    folders = [path, *step_folders(checkpoints_path(path))]
    manifest = next((folder / MANIFEST for folder in folders if (folder / MANIFEST).is_file()), None)
    if manifest is None:
        raise UserError(f"there is no checkpoint in {path}: name the dump_folder of a run, or one checkpoint")
    return read_model(manifest)
