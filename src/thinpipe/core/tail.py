"""Reads a file that somebody else still writes, line by line. It never waits: ask again later."""

import os
from pathlib import Path


class Tail:
    """Whole lines that are appended to a file from now on; with `whole` also those that it has."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._file = None if whole else _identity(path)
        self._offset = 0 if self._file is None else path.stat().st_size
        self.restarted = False
        """The last call of `lines` found another file, or a shorter one, and began at its beginning."""

    def lines(self) -> list[bytes]:
        self.restarted = False
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                known, self._file = self._file, (found.st_dev, found.st_ino)
                if found.st_size < self._offset or known not in (None, self._file):
                    self._offset, self.restarted = 0, True
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        return whole.split(b"\n") if newline else []


def _identity(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_dev, path.stat().st_ino) if path.exists() else None
