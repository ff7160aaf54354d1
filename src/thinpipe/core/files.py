"""Files that are whole or absent, also after a crash or a power cut.

A file is written under a temporary name beside its target, flushed to the disk, renamed, and the folder is flushed.
What several files mean together is for the caller: write the file that names the others last, remove it first.
"""

import hashlib
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

_TEMPORARY_SUFFIX = ".partial"


class AtomicFile:
    """A file being written: `commit` makes it appear whole under its name, `discard` leaves no trace.

    As a context manager it commits at the end of the block and discards when the block raises.
    """

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        """`mode` is who may read and write it, less what the user's umask takes away."""
        self.path = path
        # A random part, so that two writers of one name cannot write into each other's bytes.
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")
        self._file = open(  # noqa: SIM115
            self._temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)
        )

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def commit(self) -> None:
        """Returns once the content and the name are on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Does nothing after a commit. Removes the file even when its last bytes no longer fit on the disk."""
        try:
            self._file.close()
        except OSError:
            pass  # close flushes; whatever it could not write is unwanted
        finally:
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.discard()


def write_atomically(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Replaces `path` by a file with this content; readers see the old file or the new one, never a part."""
    with AtomicFile(path, mode=mode) as file:
        file.write(data)


def remove_durably(path: Path) -> None:
    """Removes a file, if it is there, and returns once that is on the disk."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_partial_files(folder: Path) -> None:
    """Removes what killed writers left behind. Only for a folder in which nobody is writing now."""
    for leftover in folder.glob(f".*{_TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder survive a power cut."""
    if os.name == "nt":
        return  # Windows cannot open a folder for this, and journals its names by itself
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Makes the content of a file that something else wrote survive a power cut."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def rename_durably(written: Path, path: Path) -> None:
    """Gives a file that something else wrote its name; returns once the content and the name are on the disk."""
    sync_file(written)
    os.replace(written, path)
    sync_folder(path.parent)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
