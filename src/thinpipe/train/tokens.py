"""Where the ids of a run come from: a folder of tokens here. Whoever joins a run has them from the hub instead."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from thinpipe.core.digest import text_sha256
from thinpipe.core.files import file_sha256
from thinpipe.data import Batches, Cursor, SpreadBatches, Tokenizer, Tokens, has_tokens
from thinpipe.train.config import RunConfig
from thinpipe.train.engine import Ids


class DataFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What everybody must know of the data, who need not have it."""

    vocab_size: int
    sha256: str
    validation_batches: int
    bits_per_byte_per_nat: float | None


class TokenSource(Protocol):
    @property
    def facts(self) -> DataFacts: ...

    def batch(self, cursor: Cursor) -> Ids: ...

    @property
    def validation(self) -> Iterable[Ids]:
        """Whole batches only: the segments of a pipeline have fixed shapes, and every placement sees the same."""
        ...

    def keep_tokenizer(self, folder: Path) -> None:
        """A run's folder is all that is needed to use the model."""
        ...


class LocalTokens:
    """A folder made by `thinpipe tokenize`."""

    def __init__(self, config: RunConfig) -> None:
        self.path = config.data.path
        seq_len, batch_size = config.training.seq_len, config.training.global_batch_size
        tokens = Tokens(self.path / "train")
        self._batches = Batches(tokens, seq_len=seq_len, batch_size=batch_size, seed=config.debug.seed)
        self.validation: Sequence[Ids] = ()
        per_nat = None
        if has_tokens(self.path / "validation"):
            text = Tokens(self.path / "validation")
            count = config.validation.steps or len(text)
            self.validation = SpreadBatches(text, seq_len=seq_len, batch_size=batch_size, count=count)
            per_nat = text.manifest.bits_per_byte(1.0)
        self.facts = DataFacts(
            vocab_size=tokens.manifest.vocabulary.size,
            sha256=tokens.manifest.content_sha256,
            validation_batches=len(self.validation),
            bits_per_byte_per_nat=per_nat,
        )

    def batch(self, cursor: Cursor) -> Ids:
        return self._batches.batch_at(cursor).ids_BW

    @property
    def tokenizer_folder(self) -> Path | None:
        folder = self.path / "tokenizer"
        return folder if folder.is_dir() else None

    def keep_tokenizer(self, folder: Path) -> None:
        if self.tokenizer_folder is not None:
            Tokenizer.load(self.tokenizer_folder).save(folder / "tokenizer")


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Of ids on their way: two bytes, unless there are more tokens than two bytes can name."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def tokenizer_sha256(files: Mapping[str, Path]) -> str:
    """Of a tokenizer's files, by name."""
    return text_sha256("\n".join(f"{name} {file_sha256(path)}" for name, path in sorted(files.items())))
