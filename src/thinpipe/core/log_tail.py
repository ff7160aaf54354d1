"""Follows a file that another process appends to, line by line. Never blocks: call `lines` again later."""

import os
from pathlib import Path


class Tail:
    """Reads complete lines appended to a file after construction; with `whole`, also the existing lines."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        self._path = path
        self._file = None if whole else _inode(path)
        self._offset = 0 if self._file is None else path.stat().st_size
        self.restarted = False
        """True if the last call of `lines` found a replaced or truncated file and started at its beginning."""

    def lines(self) -> list[bytes]:
        """Complete lines since the last call, without newlines. A partial last line waits for its newline."""
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


def _inode(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_dev, path.stat().st_ino) if path.exists() else None
