"""What `prepare` is to do, in settings. An option that would have no effect is an error."""

from dataclasses import dataclass
from pathlib import Path

from thinpipe.data.errors import DataError
from thinpipe.data.shards import DEFAULT_MAX_SHARD_TOKENS
from thinpipe.data.sources import is_hub


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to read, how to tokenize it and where to put it."""

    sources: tuple[str, ...]
    """Text to train on: files (.txt, .jsonl, .parquet), folders, globs, or hf:NAME[:CONFIG]."""
    output: Path
    """Folder to make: tokenizer/, train/ and validation/ go there."""
    text_field: str = "text"
    """Field (JSON lines) or column (Parquet, Hugging Face) that holds the text."""
    split: str | None = None
    """Split of the Hugging Face data sets in sources. None: train."""
    max_documents: int | None = None
    """Read only this many documents of sources. None: all."""
    validation_sources: tuple[str, ...] = ()
    """Text to validate on, written like sources."""
    validation_split: str | None = None
    """Split of the Hugging Face data sets in validation_sources. None: validation."""
    validation_fraction: float | None = None
    """Instead of validation_sources: about this part of the documents, chosen by their content and validation_seed."""
    validation_seed: int = 0
    """Another seed makes validation_fraction choose other documents."""
    tokenizer: Path | None = None
    """An existing tokenizer.json, or a folder with one. None: train one on the text."""
    end_of_text: str | None = None
    """Token of the existing tokenizer that closes a document. None: its eos_token, else <|endoftext|>."""
    vocab_size: int | None = None
    """Of the tokenizer to train. None: 32,768."""
    tokenizer_text_nbytes: int | None = None
    """The tokenizer to train learns from this much text, the first of the sources. None: 1 GB."""
    max_shard_tokens: int = DEFAULT_MAX_SHARD_TOKENS
    """Largest number of tokens in one file."""
    overwrite: bool = False
    """Replace the tokens that the output folder already holds."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("sources is empty: name at least one file, folder, glob or hf:NAME")
        for name in ("max_documents", "vocab_size", "tokenizer_text_nbytes", "max_shard_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} {value} must be at least 1")
        if self.validation_fraction is not None and not 0 < self.validation_fraction < 1:
            raise DataError(
                f"validation_fraction {self.validation_fraction} must lie between 0 and 1, for example 0.01"
            )
        if self.validation_fraction is not None and self.validation_sources:
            raise DataError("validation_fraction and validation_sources exclude each other: give one")
        self._refuse_options_without_effect()

    def _refuse_options_without_effect(self) -> None:
        if self.validation_fraction is None and self.validation_seed:
            raise DataError("validation_seed is for validation_fraction: give that too, or leave validation_seed out")
        if self.tokenizer is None and self.end_of_text is not None:
            raise DataError("end_of_text is for an existing tokenizer: leave it out, or name the tokenizer")
        for name in ("vocab_size", "tokenizer_text_nbytes"):
            if self.tokenizer is not None and getattr(self, name) is not None:
                raise DataError(f"{name} is for a new tokenizer: leave it out, or leave tokenizer out")
        for split, sources in (("split", self.sources), ("validation_split", self.validation_sources)):
            if getattr(self, split) is not None and not any(map(is_hub, sources)):
                raise DataError(f"{split} is for Hugging Face data sets, and none is named (hf:NAME): leave it out")
