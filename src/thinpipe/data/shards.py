"""Token shards: files of raw little-endian token ids with a bounded size, and a manifest that is written last.

Documents are concatenated, each followed by the end-of-text token; a document may span several files. Chats are
concatenated as they were rendered, and their tokens have flags (`core.token_flags`). Contains the writer and the
memory-mapped reader; independent of text and tokenizers.
"""

import bisect
import hashlib
import itertools
import os
from collections.abc import Container
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt

from thinpipe.config.data import DEFAULT_MAX_SHARD_TOKENS, TrainOn
from thinpipe.core.errors import DataError
from thinpipe.core.files import file_sha256, remove_durably, remove_partial_files, sync_folder, write_atomically
from thinpipe.core.token_flags import BEGINS, MAX_FLAGGED_VOCABULARY, TRAINED
from thinpipe.data.manifest import (
    CHAT_FORMAT_VERSION,
    FORMAT_VERSION,
    MANIFEST_NAME,
    ChatFacts,
    Manifest,
    ShardEntry,
    Vocabulary,
    encode_manifest,
    read_manifest,
)
from thinpipe.data.progress import Progress, no_progress


class ChatRendering(NamedTuple):
    """How chats became tokens."""

    template_sha256: str
    train_on: TrainOn


class WriterState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a writer has on the disk, from which another one goes on."""

    shards: tuple[ShardEntry, ...]
    """Full shards."""
    open_tokens: int
    """Tokens of the shard after them."""
    documents: int
    text_nbytes: int
    trained_tokens: int
    longest_chat: int


class _OpenShard:
    """The shard being written, with its running hash. It has its final name: a folder without a manifest is incomplete
    whatever it holds."""

    def __init__(self, path: Path, dtype: np.dtype[Any], *, kept_tokens: int = 0) -> None:
        """`kept_tokens`: tokens of an interrupted writer to keep; what comes after them is cut off."""
        self.path, self.tokens = path, kept_tokens
        nbytes = kept_tokens * dtype.itemsize
        if kept_tokens and (not path.is_file() or path.stat().st_size < nbytes):
            raise DataError(f"{path} has lost tokens since it was written: remove {path.parents[1]} to begin anew")
        self.file = path.open("r+b" if kept_tokens else "wb")
        self.hash = hashlib.sha256(self.file.read(nbytes) if kept_tokens else b"")
        self.file.truncate(nbytes)
        self.file.seek(nbytes)

    def write(self, ids: npt.NDArray[Any]) -> None:
        data = ids.tobytes()
        self.file.write(data)
        self.hash.update(data)
        self.tokens += len(ids)

    def sync(self) -> None:
        """Returns once content and name are on the disk."""
        self.file.flush()
        os.fsync(self.file.fileno())
        sync_folder(self.path.parent)

    def commit(self) -> ShardEntry:
        self.sync()
        self.file.close()
        return ShardEntry(file=self.path.name, tokens=self.tokens, sha256=self.hash.hexdigest())


class ShardWriter:
    """Writes tokenized documents to a folder of shards, which cannot be opened before `finish`. Not for concurrent
    writers. Raises DataError if the folder already has complete tokens.

    As a context manager, closes its incomplete file if the block is left without `finish`.
    """

    def __init__(
        self,
        folder: Path,
        vocabulary: Vocabulary,
        *,
        source: str,
        max_shard_tokens: int = DEFAULT_MAX_SHARD_TOKENS,
        chat: ChatRendering | None = None,
        resume: WriterState | None = None,
    ) -> None:
        """`chat`: how chats were rendered; None: the documents are plain text. `resume`: what `save` of an interrupted
        writer with the same arguments returned; what it wrote later is removed, its manifest too."""
        if max_shard_tokens < 1:
            raise ValueError(f"max_shard_tokens {max_shard_tokens} must be at least 1")
        if resume is None:
            refuse_finished_tokens(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.vocabulary, self.source = folder, vocabulary, source
        self.max_shard_tokens = max_shard_tokens
        self.documents = self.text_nbytes = self.trained_tokens = self.longest_chat = 0
        if chat is not None and vocabulary.size > MAX_FLAGGED_VOCABULARY:
            raise DataError(f"a vocabulary of {vocabulary.size:,} ids leaves no bits for the flags of chats")
        self.chat = chat
        self._dtype = np.dtype("<u2" if vocabulary.size <= 2**16 and chat is None else "<u4")
        self._end_of_text = np.array([vocabulary.end_of_text_id], self._dtype)
        self._entries: list[ShardEntry] = []
        self._open: _OpenShard | None = None
        if resume is None:
            remove_tokens(folder)  # shards of an interrupted writer
        else:
            self._resume(resume)

    def _resume(self, state: WriterState) -> None:
        self._entries = list(state.shards)
        self.documents, self.text_nbytes = state.documents, state.text_nbytes
        self.trained_tokens, self.longest_chat = state.trained_tokens, state.longest_chat
        unfinished = {self._next_path.name} if state.open_tokens else set()
        remove_tokens(self.folder, but=unfinished | {entry.file for entry in state.shards})
        for entry in state.shards:
            path, nbytes = self.folder / entry.file, entry.tokens * self._dtype.itemsize
            if not path.is_file() or path.stat().st_size != nbytes:
                raise DataError(f"{path} has changed since it was written: remove {path.parents[1]} to begin anew")
        if state.open_tokens:
            self._open = _OpenShard(self._next_path, self._dtype, kept_tokens=state.open_tokens)

    @property
    def _next_path(self) -> Path:
        return self.folder / f"shard-{len(self._entries):05d}.bin"

    def save(self) -> WriterState:
        """What has been added, once it is on the disk."""
        if self._open is not None:
            self._open.sync()
        return WriterState(
            shards=tuple(self._entries),
            open_tokens=0 if self._open is None else self._open.tokens,
            documents=self.documents,
            text_nbytes=self.text_nbytes,
            trained_tokens=self.trained_tokens,
            longest_chat=self.longest_chat,
        )

    def add(self, ids: npt.NDArray[np.uint32], *, text_nbytes: int, ends_document: bool = True) -> None:
        """Appends a document, or a part of one: `ids` without the end-of-text token, and the size of its text in UTF-8
        bytes."""
        if self.chat is not None:
            raise ValueError("a folder of chats has no documents of plain text")
        self._check_ids(ids)
        self._append(ids.astype(self._dtype))
        if ends_document:
            self._append(self._end_of_text)
            self.documents += 1
        self.text_nbytes += text_nbytes

    def add_chat(self, ids: npt.NDArray[np.uint32], trained: npt.NDArray[np.bool_], *, text_nbytes: int) -> None:
        """Appends one chat: its ids as rendered, which of them are trained on, and the size of the rendered text."""
        if self.chat is None or not len(ids) or ids.shape != trained.shape:
            raise ValueError(f"no chat for this folder: {ids.shape} ids and {trained.shape} flags")
        self._check_ids(ids)
        flagged = ids | np.where(trained, TRAINED, 0).astype(np.uint32)
        flagged[0] = ids[0] | BEGINS  # nothing comes before the first token, from which it could be learnt
        self._append(flagged.astype(self._dtype))
        self.documents += 1
        self.text_nbytes += text_nbytes
        self.trained_tokens += int(trained[1:].sum())
        self.longest_chat = max(self.longest_chat, len(ids))

    def _check_ids(self, ids: npt.NDArray[np.uint32]) -> None:
        if ids.size and int(ids.max()) >= self.vocabulary.size:
            raise ValueError(f"id {int(ids.max())} is not in a vocabulary of {self.vocabulary.size}")

    def finish(self) -> Manifest:
        """Completes the last shard, then writes the manifest. Raises DataError if there was no text."""
        if not self.text_nbytes:
            raise DataError(f"no text for {self.folder}: all documents of {self.source} are empty, or there are none")
        if self._open is not None:
            self._commit_shard(self._open)
        manifest = Manifest(
            format_version=FORMAT_VERSION if self.chat is None else CHAT_FORMAT_VERSION,
            dtype="uint16" if self._dtype.itemsize == 2 else "uint32",
            vocabulary=self.vocabulary,
            documents=self.documents,
            text_nbytes=self.text_nbytes,
            source=self.source,
            shards=tuple(self._entries),
            chat=msgspec.UNSET if self.chat is None else self._chat_facts(self.chat),
        )
        write_atomically(self.folder / MANIFEST_NAME, encode_manifest(manifest))
        return manifest

    def _chat_facts(self, chat: ChatRendering) -> ChatFacts:
        return ChatFacts(
            template_sha256=chat.template_sha256,
            train_on=chat.train_on,
            trained_tokens=self.trained_tokens,
            longest_chat=self.longest_chat,
        )

    def _append(self, ids: npt.NDArray[Any]) -> None:
        while len(ids):
            if self._open is None:
                self._open = _OpenShard(self._next_path, self._dtype)
            room = self.max_shard_tokens - self._open.tokens
            self._open.write(ids[:room])
            ids = ids[room:]
            if self._open.tokens == self.max_shard_tokens:
                self._commit_shard(self._open)

    def _commit_shard(self, shard: _OpenShard) -> None:
        self._open = None
        self._entries.append(shard.commit())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.file.close()


class Tokens:
    """Read access to a complete folder of shards as one token sequence. Opening checks the manifest and all file sizes,
    and raises DataError."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._shards = [self._map(entry) for entry in self.manifest.shards]
        self._starts = list(itertools.accumulate((len(shard) for shard in self._shards), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """A copy of the token ids start ... stop - 1, which may span several files. Those of chats have their flags."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"ids {start} ... {stop - 1} do not lie in 0 ... {len(self) - 1}")
        ids = np.empty(stop - start, np.int64)
        index = bisect.bisect_right(self._starts, start) - 1
        position = start
        while position < stop:
            part = self._shards[index][position - self._starts[index] : stop - self._starts[index]]
            ids[position - start : position - start + len(part)] = part
            position += len(part)
            index += 1
        return ids

    def chat_starts(self) -> npt.NDArray[np.int64]:
        """Where each chat begins, and where the last one ends."""
        found = [
            start + np.flatnonzero(shard & np.uint32(BEGINS))
            for start, shard in zip(self._starts[:-1], self._shards, strict=True)
        ]
        return np.concatenate([*found, np.array([len(self)])]).astype(np.int64)

    def verify(self, progress: Progress = no_progress) -> None:
        """Compares the sha256 of every file with the manifest. Raises DataError on a mismatch."""
        with progress("verifying", len(self) * self.manifest.itemsize_nbytes) as advance:
            for entry in self.manifest.shards:
                if file_sha256(self.folder / entry.file) != entry.sha256:
                    raise DataError(
                        f"{self.folder / entry.file} has changed since it was written (its sha256 differs from the "
                        "manifest): copy it again, or prepare the tokens again"
                    )
                advance(entry.tokens * self.manifest.itemsize_nbytes)

    def _map(self, entry: ShardEntry) -> npt.NDArray[Any]:
        path, expected_nbytes = self.folder / entry.file, entry.tokens * self.manifest.itemsize_nbytes
        remedy = "copy the folder again, or prepare the tokens again"
        if not path.is_file():
            raise DataError(f"{path} is missing, but the manifest names it: {remedy}")
        if (nbytes := path.stat().st_size) != expected_nbytes:
            raise DataError(f"{path} has {nbytes:,} bytes where the manifest says {expected_nbytes:,}: {remedy}")
        mapped = np.memmap(path, dtype=np.dtype(self.manifest.dtype).newbyteorder("<"), mode="r")
        return mapped.view(np.ndarray)  # shares the memory; slicing np.memmap itself is 2 to 4 times slower


def has_tokens(folder: Path) -> bool:
    """Whether the folder has complete tokens, that is, a manifest."""
    return (folder / MANIFEST_NAME).is_file()


def refuse_finished_tokens(folder: Path) -> None:
    """Raises DataError if the folder has complete tokens."""
    if has_tokens(folder):
        raise DataError(f"{folder} already holds finished tokens: choose another folder, or pass --overwrite")


def remove_tokens(folder: Path, *, but: Container[str] = ()) -> None:
    """Removes manifest, shards and temporary files, and no other file; `but`: names of shards to keep. The manifest is
    removed first, so that a partly removed folder cannot be opened."""
    remove_durably(folder / MANIFEST_NAME)
    for shard in folder.glob("shard-*.bin"):
        if shard.name not in but:
            shard.unlink()
    remove_partial_files(folder)
