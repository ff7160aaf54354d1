"""Sources of documents: files, folders, globs and Hugging Face data sets behind one interface, and the split into
training and validation text.

Files are read in sorted order, the same on every machine. `readers` reads a single file.
"""

import glob
import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from thinpipe.config.data import HUGGINGFACE_PREFIX, is_huggingface
from thinpipe.core.errors import DataError
from thinpipe.data.chat.records import CHAT_READERS, read_huggingface_chats
from thinpipe.data.readers import READERS, Document, Reader, read_huggingface

_SAMPLE_PREFIX = "sample:"
_SAMPLE_FOLDER = Path(__file__).parent / "sample"
"""Public-domain sample text that is part of the package."""


class Source(Protocol):
    """A sequence of documents that can be iterated over any number of times."""

    @property
    def description(self) -> str: ...

    @property
    def total_nbytes(self) -> int | None:
        """Bytes to read, when that is known before reading."""
        ...

    @property
    def files(self) -> tuple[Path, ...]:
        """Files to read; none of data sets."""
        ...

    def documents(self) -> Iterator[Document]: ...


@dataclass(frozen=True)
class FileSource:
    description: str
    files: tuple[Path, ...]
    field: str
    readers: Mapping[str, Reader]
    """By suffix."""

    @property
    def total_nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            yield from self.readers[path.suffix.lower()](path, self.field)


@dataclass(frozen=True)
class HuggingFaceSource:
    name: str
    config: str | None
    split: str
    field: str
    chats: bool = False

    total_nbytes: int | None = None
    files: tuple[Path, ...] = ()

    @property
    def description(self) -> str:
        return f"{HUGGINGFACE_PREFIX}{self.name}{f':{self.config}' if self.config else ''} ({self.split})"

    def documents(self) -> Iterator[Document]:
        if self.chats:
            yield from read_huggingface_chats(self.name, self.config, self.split)
        else:
            yield from read_huggingface(self.name, self.config, self.split, self.field)


@dataclass(frozen=True)
class JoinedSource:
    """Concatenation of several sources."""

    parts: tuple[Source, ...]

    @property
    def description(self) -> str:
        return ", ".join(part.description for part in self.parts)

    @property
    def total_nbytes(self) -> int | None:
        sizes = [part.total_nbytes for part in self.parts]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for part in self.parts for file in part.files)

    def documents(self) -> Iterator[Document]:
        for part in self.parts:
            yield from part.documents()


def open_sources(specs: Sequence[str], *, field: str = "text", split: str = "train", chats: bool = False) -> Source:
    """The concatenated sources of all specs. A spec is a file, a folder, a glob, sample:NAME, or hf:NAME[:CONFIG].

    `field`: name of the text field; `split`: split of Hugging Face data sets. `chats`: documents are the records
    themselves, as JSON (`data.chat.records`). Raises DataError for an invalid spec.
    """
    return JoinedSource(tuple(_open_source(spec, field, split, chats=chats) for spec in specs))


def _open_source(spec: str, field: str, split: str, *, chats: bool) -> Source:
    readers = CHAT_READERS if chats else READERS
    if spec.startswith(_SAMPLE_PREFIX) and chats:
        raise DataError(f"'{spec}' is text without turns: name a file of chats, or leave --chat out")
    if spec.startswith(_SAMPLE_PREFIX):
        return FileSource(spec, _sample_files(spec.removeprefix(_SAMPLE_PREFIX)), field, readers)
    if not is_huggingface(spec):
        return FileSource(spec, _find_files(spec, readers), field, readers)
    name, _, config = spec.removeprefix(HUGGINGFACE_PREFIX).partition(":")
    if not name:
        raise DataError(f"'{spec}' names no data set: write hf:NAME or hf:NAME:CONFIG")
    return HuggingFaceSource(name, config or None, split, field, chats)


def _sample_files(name: str) -> tuple[Path, ...]:
    files = tuple(sorted(_SAMPLE_FOLDER.glob(f"{name}-*.txt")))
    if not files:
        raise DataError(f"there is no sample text {name!r}: write sample:train or sample:validation")
    return files


def _find_files(spec: str, readers: Mapping[str, Reader]) -> tuple[Path, ...]:
    path, known = Path(spec), ", ".join(readers)
    if path.is_dir():
        visible = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path))]
        found = [file for file in visible if file.is_file() and file.suffix.lower() in readers]
        if not found:
            raise DataError(f"the folder {spec} has no file that can be read: {known}")
    else:
        found = [path] if path.exists() else [Path(match) for match in glob.glob(spec, recursive=True)]
        found = [file for file in found if file.is_file()]
        if not found:
            raise DataError(
                f"'{spec}' is no file or folder, and matches none as a pattern; write hf:NAME for a data set"
            )
        if unknown := [file for file in found if file.suffix.lower() not in readers]:
            raise DataError(f"{unknown[0]}: cannot read this kind of file; use {known} files")
    # By the text of the path: Path itself sorts without regard to case on Windows.
    return tuple(sorted(found, key=lambda file: file.as_posix()))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


Split = Literal["train", "validation"]


@dataclass(frozen=True, kw_only=True)
class SplitText:
    """Training and validation text. Validation documents come from the source `validation`, or are a `fraction` of
    `train` selected by a hash of seed and text, or do not exist; at most one of the two is set."""

    train: Source
    validation: Source | None = None
    fraction: float | None = None
    seed: int = 0
    max_documents: int | None = None
    """Maximum number of documents read from `train`, before the split. None: all."""

    @property
    def descriptions(self) -> dict[Split, str]:
        """Description of the sources of each split, for manifests."""
        if self.validation is not None:
            return {"train": self.train.description, "validation": self.validation.description}
        if self.fraction is not None:
            part = f"{self.fraction:g} of the documents of {self.train.description}"
            return {"train": f"{self.train.description} without the documents for validation", "validation": part}
        return {"train": self.train.description}

    @property
    def total_nbytes(self) -> int | None:
        """Bytes to read, when that is known before reading."""
        sizes = [source.total_nbytes for source in (self.train, self.validation) if source is not None]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) and self.max_documents is None else None

    @property
    def files(self) -> tuple[Path, ...]:
        return (*self.train.files, *(() if self.validation is None else self.validation.files))

    def documents(self) -> Iterator[tuple[Split, Document]]:
        if self.validation is not None:
            for document in self.validation.documents():
                yield "validation", document
        for document in itertools.islice(self.train.documents(), self.max_documents):
            yield self._split_of(document.text), document

    def train_documents(self) -> Iterator[Document]:
        """Documents of the training split only."""
        for document in itertools.islice(self.train.documents(), self.max_documents):
            if self._split_of(document.text) == "train":
                yield document

    def train_texts(self) -> Iterator[str]:
        """Texts of the training split only, to train a tokenizer on."""
        return (document.text for document in self.train_documents())

    def _split_of(self, text: str) -> Split:
        if self.fraction is None:
            return "train"
        hashed = hashlib.sha256(f"{self.seed}\n{text}".encode()).digest()
        return "validation" if int.from_bytes(hashed[:6], "big") < self.fraction * 2**48 else "train"
