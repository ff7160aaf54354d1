"""Atomic and durable file writes: after a crash or a power cut a file is complete or absent.

A file is written under a temporary name in the target's folder, fsynced and renamed, and the folder is fsynced.
Consistency across several files is up to the caller: write the file that references the others last, delete it first.
"""

import hashlib
import os
import secrets
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_TEMPORARY_SUFFIX = ".partial"
_OPEN_SECONDS = 5.0 if sys.platform == "win32" else 0.0
"""Seconds to wait for other programs that have a file open, where that keeps it from being renamed or replaced."""


class AtomicFile:
    """A file being written: `commit` makes it appear under its name with its full content, `discard` removes it.

    As a context manager, commits at the end of the block and discards if the block raises.
    """

    def __init__(self, path: Path, *, mode: int = 0o666) -> None:
        """`mode`: permission bits of the file, before the umask is applied."""
        self.path = path
        # The name has a random part, so that two writers of the same target never share a temporary file.
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMPORARY_SUFFIX}")
        self._file = open(  # noqa: SIM115
            self._temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)
        )

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)

    def commit(self) -> None:
        """Makes the file visible under its name; returns once content and name are on the disk."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            replace(self._temporary, self.path)
        except BaseException:
            self.discard()
            raise
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Removes the temporary file, also when the disk is full. No-op after a commit."""
        try:
            self._file.close()
        except OSError:
            pass  # close() flushes and may fail on a full disk; the content is discarded anyway
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
    """Replaces `path` by a file with this content; readers see the old file or the new one, never a partial file."""
    with AtomicFile(path, mode=mode) as file:
        file.write(data)


def remove_durably(path: Path) -> None:
    """Removes a file if it exists; returns once the removal is on the disk."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def remove_partial_files(folder: Path) -> None:
    """Removes temporary files of writers that were killed. Call it only while no process writes to the folder."""
    for leftover in folder.glob(f".*{_TEMPORARY_SUFFIX}"):
        leftover.unlink(missing_ok=True)


def replace(source: Path, target: Path) -> None:
    """`os.replace` of a file or a folder. Windows refuses that while another program reads one of the files, as virus
    scanners do with new ones: there it is tried again for a few seconds."""
    deadline = time.monotonic() + _OPEN_SECONDS
    while True:
        try:
            os.replace(source, target)
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)
        else:
            return


def sync_folder(folder: Path) -> None:
    """Makes renames and removals in a folder survive a power cut."""
    if os.name == "nt":
        return  # Windows cannot open a folder for fsync; NTFS journals file names itself
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Fsyncs a file that other code has written."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def rename_durably(written: Path, path: Path) -> None:
    """Renames the file `written` by other code to `path`; returns once content and name are on the disk."""
    sync_file(written)
    replace(written, path)
    sync_folder(path.parent)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
