"""The model that a run trains, as its settings say: a preset, the model of a checkpoint, or one of Hugging Face."""

from thinpipe.checkpoint import Checkpoint, model_config_of
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.data.manifest import read_manifest
from thinpipe.models import ModelConfig


def choose_model(
    config: RunConfig, vocabulary: int, origin: Checkpoint | None, *, reads_tokens: bool
) -> ModelConfig | HuggingFaceModelConfig:
    """The model's configuration. Raises UserError if it does not fit the data or the other settings.

    `vocabulary`: ids in the run's tokens; `origin`: the checkpoint that `model.initial` names, or a later one of the
    run; `reads_tokens`: whether this process has the folder of tokens.
    """
    model = _model(config, vocabulary, origin, reads_tokens)
    if not model.boundaries and config.boundary != BoundaryConfig():
        raise UserError(
            "[boundary] has settings, but model.boundaries is empty, so no message crosses a boundary: "
            "set model.boundaries, or leave [boundary] out"
        )
    if not model.in_subspace and config.optimizer.second_moment != "row":
        raise UserError("optimizer.second_moment is for subspace models: leave it out, or set model.subspace.width")
    if model.max_seq_len is not None and config.training.seq_len > model.max_seq_len:
        remedy = ", or raise model.max_seq_len" if config.model.hf is None else ""
        raise UserError(
            f"training.seq_len {config.training.seq_len} is above the model's max_seq_len {model.max_seq_len}: "
            f"lower training.seq_len{remedy}"
        )
    return model


def _model(
    config: RunConfig, vocabulary: int, origin: Checkpoint | None, reads_tokens: bool
) -> ModelConfig | HuggingFaceModelConfig:
    settings = config.model
    if settings.hf is not None:
        return _huggingface_model(config, vocabulary, reads_tokens)
    if settings.initial is None:
        return settings.resolve(vocabulary)
    assert origin is not None
    model = model_config_of(origin)
    if vocabulary > model.vocab_size:
        raise UserError(
            f"the tokens in {config.data.in_words} have a vocabulary of {vocabulary} ids, and the model in "
            f"{settings.initial} has one of {model.vocab_size}: make the tokens with `thinpipe tokenize "
            f"--tokenizer {settings.initial / 'tokenizer'}`"
        )
    return model


def _huggingface_model(config: RunConfig, vocabulary: int, reads_tokens: bool) -> HuggingFaceModelConfig:
    from thinpipe.models.hf.model_of_run import model_of_run, refuse_other_tokenizer

    model, tokens = model_of_run(config), config.data.folders[0]  # the others have the same tokenizer
    if reads_tokens:
        refuse_other_tokenizer(model.source, read_manifest(tokens / "train").vocabulary, tokens)
    if vocabulary > model.vocab_size:
        raise UserError(
            f"the tokens in {tokens} have a vocabulary of {vocabulary} ids, and {model.source} has one of "
            f"{model.vocab_size}: make the tokens with `thinpipe tokenize --tokenizer` and the model's folder"
        )
    return model
