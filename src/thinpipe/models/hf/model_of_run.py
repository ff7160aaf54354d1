"""The Hugging Face model that the settings of a run name, what its base consists of, and whether the run's tokens are
those of its tokenizer."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from thinpipe.config.huggingface_model import HuggingFaceModelConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import DataError, UserError
from thinpipe.core.extras import require_extra
from thinpipe.core.safetensors_header import TensorPlace
from thinpipe.data import Tokenizer, Vocabulary
from thinpipe.models.hf.base_files import base_file, open_source, pinned_source

if TYPE_CHECKING:
    from thinpipe.models.hf.base_statement import BaseStatement

_LOG = logging.getLogger(__name__)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
"""Files of a tokenizer, as transformers writes them."""


def model_of_run(config: RunConfig) -> HuggingFaceModelConfig:
    """The model with the boundaries and adapters of the run. Raises UserError."""
    assert config.model.hf is not None
    for module in ("transformers", "peft"):
        require_extra(module, extra="tune", feature="model.hf")
    if config.model.quantize_base is not None:
        require_extra("bitsandbytes", extra="qlora", feature="model.quantize_base")
    from thinpipe.models.hf.pretrained_config import read_model  # transformers takes seconds to import

    source, folder = pinned_source(config.model.hf)
    model = read_model(folder, config.model.boundaries or ())
    return replace(model, source=source, lora=config.lora, quantize_base=config.model.quantize_base)


def state_of_model(model: HuggingFaceModelConfig) -> tuple["BaseStatement", dict[str, TensorPlace]]:
    """What the base consists of, and where its tensors lie. Reads all of it, for the hashes. Raises UserError."""
    from thinpipe.models.hf.base_statement import state_base
    from thinpipe.models.hf.hollow import names_read
    from thinpipe.models.hf.pretrained_config import transformers_config

    places = open_source(model.source).places()
    stored, shapes = transformers_config(model.stored), {name: place.shape for name, place in places.items()}
    return state_base(places, [names_read(stored, blocks, shapes) for blocks in model.segments]), places


def refuse_other_tokenizer(source: str, vocabulary: Vocabulary, tokens: Path) -> None:
    """Raises UserError unless the tokens in a folder were made with the tokenizer of the base."""
    main = base_file(source, TOKENIZER_FILES[0])
    if main is None:
        _LOG.warning("%s has no tokenizer.json: cannot check that %s was made with its tokenizer", source, tokens)
        return
    for name in TOKENIZER_FILES[1:3]:  # beside it, where `Tokenizer.load` looks for them
        base_file(source, name)
    remedy = f"make the tokens with `thinpipe tokenize --tokenizer {main.parent}`"
    try:
        theirs = Tokenizer.load(main.parent, _end_of_text(main.parent, vocabulary))
    except DataError as error:
        raise UserError(f"{tokens} was not made with the tokenizer of {source} ({error}): {remedy}") from error
    if theirs.vocabulary != vocabulary:
        raise UserError(
            f"{tokens} was made with another tokenizer (sha256 {vocabulary.tokenizer_sha256[:12]}) than that of "
            f"{source} ({theirs.vocabulary.tokenizer_sha256[:12]}): {remedy}"
        )


def _end_of_text(folder: Path, vocabulary: Vocabulary) -> str | None:
    """The token that ends a document in the tokens: `thinpipe tokenize --end-of-text` may have chosen it."""
    import tokenizers

    found = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER_FILES[0])).id_to_token(vocabulary.end_of_text_id)
    return None if found is None else str(found)
