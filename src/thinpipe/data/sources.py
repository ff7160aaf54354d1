"""Which documents, in which order: files, folders, globs and Hugging Face data sets behind one interface.

Files come in sorted order, the same on every machine. How a file is read is for `readers`.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from thinpipe.data.errors import DataError
from thinpipe.data.readers import READERS, Document, read_hub

_HUB_PREFIX = "hf:"
_SAMPLE_PREFIX = "sample:"
_SAMPLE_FOLDER = Path(__file__).parent / "sample"
"""Public-domain text that ships with the package."""


class Source(Protocol):
    """Documents that can be gone through any number of times."""

    @property
    def description(self) -> str: ...

    @property
    def total_nbytes(self) -> int | None:
        """Bytes to read, when that is known before reading."""
        ...

    def documents(self) -> Iterator[Document]: ...


@dataclass(frozen=True)
class FileSource:
    description: str
    files: tuple[Path, ...]
    field: str

    @property
    def total_nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.files)

    def documents(self) -> Iterator[Document]:
        for path in self.files:
            yield from READERS[path.suffix.lower()](path, self.field)


@dataclass(frozen=True)
class HubSource:
    name: str
    config: str | None
    split: str
    field: str

    total_nbytes: int | None = None

    @property
    def description(self) -> str:
        return f"{_HUB_PREFIX}{self.name}{f':{self.config}' if self.config else ''} ({self.split})"

    def documents(self) -> Iterator[Document]:
        yield from read_hub(self.name, self.config, self.split, self.field)


@dataclass(frozen=True)
class JoinedSource:
    """One source after the other."""

    parts: tuple[Source, ...]

    @property
    def description(self) -> str:
        return ", ".join(part.description for part in self.parts)

    @property
    def total_nbytes(self) -> int | None:
        sizes = [part.total_nbytes for part in self.parts]
        return sum(size for size in sizes if size is not None) if None not in sizes else None

    def documents(self) -> Iterator[Document]:
        for part in self.parts:
            yield from part.documents()


def open_sources(specs: Sequence[str], *, field: str = "text", split: str = "train") -> Source:
    """Each spec is a file, a folder, a glob, sample:NAME, or hf:NAME[:CONFIG], of which `split` is read."""
    return JoinedSource(tuple(_open_source(spec, field, split) for spec in specs))


def is_hub(spec: str) -> bool:
    return spec.startswith(_HUB_PREFIX)


def _open_source(spec: str, field: str, split: str) -> Source:
    if spec.startswith(_SAMPLE_PREFIX):
        return FileSource(spec, _sample_files(spec.removeprefix(_SAMPLE_PREFIX)), field)
    if not is_hub(spec):
        return FileSource(spec, _find_files(spec), field)
    name, _, config = spec.removeprefix(_HUB_PREFIX).partition(":")
    if not name:
        raise DataError(f"'{spec}' names no data set: write hf:NAME or hf:NAME:CONFIG")
    return HubSource(name, config or None, split, field)


def _sample_files(name: str) -> tuple[Path, ...]:
    files = tuple(sorted(_SAMPLE_FOLDER.glob(f"{name}-*.txt")))
    if not files:
        raise DataError(f"there is no sample text {name!r}: write sample:train or sample:validation")
    return files


def _find_files(spec: str) -> tuple[Path, ...]:
    path, known = Path(spec), ", ".join(READERS)
    if path.is_dir():
        visible = [file for file in path.rglob("*") if not _is_hidden(file.relative_to(path))]
        found = [file for file in visible if file.is_file() and file.suffix.lower() in READERS]
        if not found:
            raise DataError(f"the folder {spec} holds no {known} file")
    else:
        found = [path] if path.exists() else [Path(match) for match in glob.glob(spec, recursive=True)]
        found = [file for file in found if file.is_file()]
        if not found:
            raise DataError(f"'{spec}' is no file, folder or pattern that matches one; a data set is written hf:NAME")
        if unknown := [file for file in found if file.suffix.lower() not in READERS]:
            raise DataError(f"{unknown[0]}: cannot read this kind of file; give {known} files")
    # By the text of the path: Path itself sorts without regard to case on Windows.
    return tuple(sorted(found, key=lambda file: file.as_posix()))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
