"""`tokenize` makes the tokens that a run trains on. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thinpipe.config.data import TokenizeConfig
from thinpipe.config.toml import from_table
from thinpipe.data.prepare import prepare


def tokenize(sources: str | Sequence[str], output: Path | str, **settings: Any) -> Path:
    """Writes tokenizer and tokens of a text, or of chats with `chat=True`, into the folder `output`, for `data.path` of
    a run; returns the folder.

    `sources`: files (.txt, .jsonl, .parquet), folders, globs, hf:NAME for a Hugging Face data set, or sample:train for
    the text that comes with thinpipe. `settings`: those of `thinpipe tokenize`, for example `vocab_size`,
    `validation_sources` or `overwrite`. Raises UserError for wrong settings, and for tokens that are there already.
    """
    listed = [sources] if isinstance(sources, str) else list(sources)
    table = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    config = from_table({"sources": listed, "output": str(output), **table}, TokenizeConfig, where="tokenize")
    prepare(config)
    return config.output
