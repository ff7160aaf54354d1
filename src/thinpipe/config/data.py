"""Settings of `thinpipe tokenize`. An option that would have no effect raises DataError."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from thinpipe.core.errors import DataError

DEFAULT_MAX_SHARD_TOKENS = 100_000_000
HUGGINGFACE_PREFIX = "hf:"
TrainOn = Literal["assistant", "completion", "all"]
TooLong = Literal["cut", "drop"]


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """Sources of text or chats, tokenizer and output folder of a tokenization."""

    sources: tuple[str, ...]
    """Training text: files (.txt, .jsonl, .parquet), folders, globs, hf:NAME[:CONFIG] for a Hugging Face data set, or
    sample:train for the text that comes with thinpipe. With chat: .jsonl, .json and .parquet files."""
    output: Path
    """Folder to create, with the subfolders tokenizer/, train/ and validation/."""
    text_field: str = "text"
    """Field (JSON lines) or column (Parquet, Hugging Face) that holds the text."""
    split: str | None = None
    """Split of the Hugging Face data sets in sources. None: train."""
    max_documents: int | None = None
    """Maximum number of documents to read from sources. None: all."""
    validation_sources: tuple[str, ...] = ()
    """Validation text, specified like sources."""
    validation_split: str | None = None
    """Split of the Hugging Face data sets in validation_sources. None: validation."""
    validation_fraction: float | None = None
    """Approximate fraction of the documents of sources to use for validation, in place of validation_sources. Documents
    are selected by a hash of their text and validation_seed."""
    validation_seed: int = 0
    """Seed of the document selection by validation_fraction."""
    tokenizer: Path | None = None
    """Existing tokenizer.json, or a folder that contains one. None: train a tokenizer on the training text."""
    end_of_text: str | None = None
    """Token of the existing tokenizer that ends a document. None: its eos_token, else <|endoftext|>."""
    vocab_size: int | None = None
    """Vocabulary size of the tokenizer to train. None: 32,768."""
    tokenizer_text_nbytes: int | None = None
    """Bytes of training text, from the beginning of sources, on which to train the tokenizer. None: 1 GB."""
    max_shard_tokens: int = DEFAULT_MAX_SHARD_TOKENS
    """Maximum number of tokens in one shard file."""
    chat: bool = False
    """Read chats and render them with the tokenizer's own chat template. Formats are found by the fields of each
    record: messages (role, content), conversations (from, value), prompt and completion, instruction (input) and
    output, or text."""
    train_on: TrainOn | None = None
    """Tokens of a chat that are trained on. assistant: all turns of the assistant. completion: its last turn. all:
    every token, as in a text without turns. None: assistant."""
    seq_len: int | None = None
    """Longest chat, in tokens; one more is kept as the last label, as in a run with this training.seq_len. None: chats
    of any length, and training.seq_len must fit the longest."""
    too_long: TooLong | None = None
    """What becomes of longer chats than seq_len. cut: their end is left out. drop: they are left out. None: cut."""
    workers: int | None = None
    """Processes that tokenize, each on a core. The tokens are the same with any number. None: one for each core."""
    overwrite: bool = False
    """Replace existing tokens in the output folder, also unfinished ones of other sources or settings. Unfinished ones
    of the same are gone on with."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("sources is empty: name at least one file, folder, glob or hf:NAME")
        for name in ("max_documents", "vocab_size", "tokenizer_text_nbytes", "max_shard_tokens", "seq_len", "workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} {value} must be at least 1")
        if self.validation_fraction is not None and not 0 < self.validation_fraction < 1:
            raise DataError(
                f"validation_fraction {self.validation_fraction} must lie between 0 and 1, for example 0.01"
            )
        if self.validation_fraction is not None and self.validation_sources:
            raise DataError("validation_fraction and validation_sources exclude each other: leave one out")
        self._refuse_options_without_effect()

    def _refuse_options_without_effect(self) -> None:
        if self.chat:
            self._refuse_options_of_text()
        else:
            for name in ("train_on", "seq_len", "too_long"):
                if getattr(self, name) is not None:
                    raise DataError(f"{name} is for chats: pass --chat, or leave {name} out")
        if self.validation_fraction is None and self.validation_seed:
            raise DataError("validation_seed is for validation_fraction: set that too, or leave validation_seed out")
        if self.tokenizer is None and self.end_of_text is not None:
            raise DataError("end_of_text is for an existing tokenizer: leave it out, or name the tokenizer")
        for name in ("vocab_size", "tokenizer_text_nbytes"):
            if self.tokenizer is not None and getattr(self, name) is not None:
                raise DataError(f"{name} is for a new tokenizer: leave it out, or leave tokenizer out")
        for split, sources in (("split", self.sources), ("validation_split", self.validation_sources)):
            if getattr(self, split) is not None and not any(map(is_huggingface, sources)):
                raise DataError(f"{split} is for Hugging Face data sets, and none is named (hf:NAME): leave it out")

    def _refuse_options_of_text(self) -> None:
        if self.tokenizer is None:
            raise DataError("chat needs a tokenizer with a chat template: pass --tokenizer FOLDER, the model's own")
        if self.text_field != "text":
            raise DataError("text_field is for text, and chats are found by their fields: leave it out")
        if self.too_long is not None and self.seq_len is None:
            raise DataError("too_long says what becomes of chats above seq_len: set seq_len, or leave too_long out")


def is_huggingface(source: str) -> bool:
    """True for a data set of the Hugging Face hub, written `hf:NAME[:CONFIG]`."""
    return source.startswith(HUGGINGFACE_PREFIX)
