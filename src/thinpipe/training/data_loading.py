"""Token batches of a run, from a local folder of token shards. A run joined through a hub gets its batches from the hub
(`swarm.peer.remote_run.RemoteTokens`)."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np

from thinpipe.config.run import RunConfig
from thinpipe.core.bounds import Count, Real, Word
from thinpipe.core.files import file_sha256
from thinpipe.core.foreign import decode_foreign
from thinpipe.core.hashing import text_sha256
from thinpipe.data import Batches, Cursor, DataError, EvenlySpacedBatches, Tokenizer, Tokens, has_tokens
from thinpipe.training.engine import Ids
from thinpipe.transport.collectives import Collectives

_LOG = logging.getLogger(__name__)


class DatasetInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Facts about the dataset that every process needs, also those without the data."""

    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    sha256: Word
    """Content hash of the training tokens."""
    validation_batches: Count
    """Number of validation batches; 0 without a validation split."""
    bits_per_byte_per_nat: Real | None
    """Factor from validation loss (nats per token) to bits per byte; None without a validation split, and for chats."""
    chats: bool = False
    """Whether the data is chats: token ids then have flags (`core.token_flags`)."""


class TokenSource(Protocol):
    """Training and validation batches of token ids, [B, T + 1], those of chats with flags. Used by process 0 only."""

    @property
    def dataset_info(self) -> DatasetInfo: ...

    def batch(self, cursor: Cursor) -> Ids: ...

    @property
    def validation(self) -> Iterable[Ids]:
        """Full validation batches only: pipeline stages have fixed shapes, and every placement evaluates the same."""
        ...

    def save_tokenizer(self, folder: Path) -> None:
        """Copies the tokenizer into the run folder `folder`, so that the model can be used from that folder alone."""
        ...


class LocalTokens:
    """Token source over a folder made by `thinpipe tokenize`."""

    def __init__(self, config: RunConfig) -> None:
        self.path = config.data.path
        seq_len, batch_size = config.training.seq_len, config.training.global_batch_size
        tokens = Tokens(self.path / "train")
        packing = bool(config.training.packing)
        self._batches = Batches(tokens, seq_len=seq_len, batch_size=batch_size, seed=config.debug.seed, packing=packing)
        self.validation: Sequence[Ids] = ()
        per_nat = None
        if has_tokens(self.path / "validation"):
            text = Tokens(self.path / "validation")
            count = config.validation.steps or len(text)
            self.validation = EvenlySpacedBatches(
                text, seq_len=seq_len, batch_size=batch_size, count=count, packing=packing
            )
            per_nat = None if text.manifest.is_chat else text.manifest.bits_per_byte(1.0)
            self._refuse_unlike(tokens, text)
        self.dataset_info = DatasetInfo(
            vocab_size=tokens.manifest.vocabulary.size,
            sha256=tokens.manifest.content_sha256,
            validation_batches=len(self.validation),
            bits_per_byte_per_nat=per_nat,
            chats=tokens.manifest.is_chat,
        )

    def _refuse_unlike(self, train: Tokens, validation: Tokens) -> None:
        if train.manifest.is_chat != validation.manifest.is_chat:
            raise DataError(f"{self.path}: of train and validation, one has chats and the other plain text")

    def batch(self, cursor: Cursor) -> Ids:
        return self._batches.batch_at(cursor).ids_BW

    @property
    def tokenizer_folder(self) -> Path | None:
        folder = self.path / "tokenizer"
        return folder if folder.is_dir() else None

    def save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer_folder is not None:
            Tokenizer.load(self.tokenizer_folder).save(folder / "tokenizer")
        else:
            _LOG.warning("%s has no tokenizer folder: `thinpipe generate` will not work for this run", self.path)


def token_dtype(vocab_size: int, *, chats: bool = False) -> np.dtype[np.unsignedinteger]:
    """Dtype of token ids on the network: 2 bytes if the vocabulary fits, else 4; 4 for chats, whose ids have flags."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 and not chats else np.dtype("<u4")


def tokenizer_sha256(files: Mapping[str, Path]) -> str:
    """Hash of a tokenizer, given its files by name."""
    return text_sha256("\n".join(f"{name} {file_sha256(path)}" for name, path in sorted(files.items())))


class BatchLoader:
    """Batches for this process. Process 0, which always has the first segment, reads ids; the others get None.

    The constructor broadcasts `DatasetInfo` from process 0, so all processes must call it.
    """

    def __init__(self, config: RunConfig, collectives: Collectives, source: TokenSource | None = None) -> None:
        self.config = config
        self.source = None if collectives.rank else source or LocalTokens(config)
        announced = collectives.broadcast_bytes(
            b"" if self.source is None else msgspec.json.encode(self.source.dataset_info)
        )
        self.dataset_info = decode_foreign(announced, DatasetInfo, form="json")

    def batch(self, cursor: Cursor) -> Ids | None:
        return None if self.source is None else self.source.batch(cursor)

    def next_cursor(self, cursor: Cursor) -> Cursor:
        return Cursor(samples_seen=cursor.samples_seen + self.config.training.global_batch_size)

    def validation_batches(self) -> Iterable[Ids | None]:
        return repeat(None, self.dataset_info.validation_batches) if self.source is None else self.source.validation

    def save_tokenizer(self) -> None:
        if self.source is not None:
            self.source.save_tokenizer(self.config.job.dump_folder)
