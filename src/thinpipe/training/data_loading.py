"""Token batches of a run, from a local folder of token shards. A run joined through a hub gets its batches from the hub
(`swarm.peer.remote_run.RemoteTokens`)."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
import numpy as np

from thinpipe.checkpoint import Checkpoint
from thinpipe.config.run import RunConfig
from thinpipe.config.run_data import MAX_CYCLE, DataConfig
from thinpipe.core.bounds import Count, Real, ShortText, Word
from thinpipe.core.errors import UserError
from thinpipe.core.files import file_sha256
from thinpipe.core.foreign import decode_foreign, sanitize
from thinpipe.core.hashing import text_sha256
from thinpipe.data import Batches, Cursor, DataError, EvenlySpacedBatches, Tokenizer, Tokens, has_tokens
from thinpipe.training.engine import Ids
from thinpipe.transport.collectives import Collectives

_LOG = logging.getLogger(__name__)


_MAX_NAME_CHARS = 60


class ValidationSource(msgspec.Struct, frozen=True, kw_only=True):
    """Validation text of one source of a mixture."""

    name: ShortText
    """Of its folder, without the place."""
    batches: Count
    weight: Annotated[int, msgspec.Meta(ge=1, le=MAX_CYCLE)]
    bits_per_byte_per_nat: Real | None
    """As in `DatasetInfo`."""


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
    validation_sources: Annotated[list[ValidationSource], msgspec.Meta(max_length=MAX_CYCLE)] = msgspec.field(
        default_factory=list
    )
    """Of a mixture: whose the validation batches are, in order; bits_per_byte_per_nat is None then."""


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
    """Token source over a folder made by `thinpipe tokenize`, or over several in a mixture."""

    def __init__(self, config: RunConfig) -> None:
        self.folders, weights = config.data.folders, config.data.weights
        training, packing = config.training, bool(config.training.packing)
        seq_len, batch_size = training.seq_len, training.global_batch_size
        sources = [Tokens(folder / "train") for folder in self.folders]
        with_text = [index for index, folder in enumerate(self.folders) if has_tokens(folder / "validation")]
        texts = [Tokens(self.folders[index] / "validation") for index in with_text]
        refuse_unlike([*sources, *texts])
        self._batches = Batches(
            *sources, seq_len=seq_len, batch_size=batch_size, seed=config.debug.seed, packing=packing, weights=weights
        )
        count = config.validation.steps or max(map(len, texts), default=0)
        self.validation = EvenlySpacedBatches(
            *texts, seq_len=seq_len, batch_size=batch_size, count=count, packing=packing
        )
        first, per_nat = sources[0].manifest, [_bits_per_byte_per_nat(text) for text in texts]
        self.dataset_info = DatasetInfo(
            vocab_size=first.vocabulary.size,
            sha256=_sha256(sources, weights),
            validation_batches=len(self.validation),
            bits_per_byte_per_nat=per_nat[0] if len(self.folders) == 1 and per_nat else None,
            chats=first.is_chat,
            validation_sources=[
                ValidationSource(name=name, batches=batches, weight=weights[index], bits_per_byte_per_nat=bits)
                for index, batches, bits, name in zip(
                    with_text, self.validation.counts, per_nat, _names(self.folders, with_text), strict=True
                )
                if batches and config.data.mixture
            ],
        )

    def batch(self, cursor: Cursor) -> Ids:
        return self._batches.batch_at(cursor).ids_BW

    @property
    def tokenizer_folder(self) -> Path | None:
        """Of the first folder that has one: all have the same."""
        return next((folder / "tokenizer" for folder in self.folders if (folder / "tokenizer").is_dir()), None)

    def save_tokenizer(self, folder: Path) -> None:
        if self.tokenizer_folder is not None:
            Tokenizer.load(self.tokenizer_folder).save(folder / "tokenizer")
        else:
            listed = ", ".join(map(str, self.folders))
            _LOG.warning("%s has no tokenizer folder: `thinpipe generate` will not work for this run", listed)


def _sha256(sources: Sequence[Tokens], weights: Sequence[int]) -> str:
    """Hash of everything that decides which sample comes when, but for sequence length, packing and seed."""
    hashes = [tokens.manifest.content_sha256 for tokens in sources]
    if len(hashes) == 1:
        return hashes[0]
    return text_sha256("\n".join(f"{weight} {found}" for weight, found in zip(weights, hashes, strict=True)))


def _bits_per_byte_per_nat(text: Tokens) -> float | None:
    return None if text.manifest.is_chat else text.manifest.bits_per_byte(1.0)


def _names(folders: Sequence[Path], chosen: Sequence[int]) -> list[str]:
    """Names of folders without their places, which are nobody else's business; numbered where they are alike."""
    names = [sanitize(folder.resolve().name, _MAX_NAME_CHARS) for folder in folders]
    return [names[index] if names.count(names[index]) == 1 else f"{names[index]} {index + 1}" for index in chosen]


def refuse_unlike(sources: Sequence[Tokens]) -> None:
    """Raises DataError unless all have one tokenizer and are all chats or all plain text."""
    first, *others = sources
    for other in others:
        both = f"{first.folder} and {other.folder}"
        if first.manifest.is_chat != other.manifest.is_chat:
            raise DataError(f"{both}: one has chats and the other plain text, and a run reads only one kind")
        if first.manifest.vocabulary != other.manifest.vocabulary:
            raise DataError(
                f"{both} were made with different tokenizers: tokenize one of them again, with --tokenizer and the "
                "tokenizer of the other"
            )


def refuse_other_data(checkpoint: Checkpoint, info: DatasetInfo, config: DataConfig) -> None:
    """Raises UserError if the run was trained on other tokens, whose samples its data cursor counts."""
    if checkpoint.manifest.data_sha256 != info.sha256:
        mixed = ", in this order and with these weights" if config.mixture else ""
        raise UserError(
            f"{checkpoint.path} was trained on other tokens than those of {config.in_words}{mixed}: set [data] to what "
            "the run began with, or job.dump_folder to a new folder, which may begin with its weights (model.initial)"
        )


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
