"""The hub's list of commits on its disk, one JSON object a line: what was committed stays so, whatever happens.

A line is written after the checkpoint itself is durable and before anybody hears of it. A crash may cut the last line
short: it is dropped, and the checkpoint, which is whole, is written down again.
"""

import os
from pathlib import Path

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.files import sync_folder
from thinpipe.swarm.commits import Commit

COMMITS = "commits.jsonl"
_DECODER = msgspec.json.Decoder(Commit)


def read_commits(path: Path) -> list[Commit]:
    """In the order of writing. Raises UserError if any line but the last cannot be read."""
    return _read(path)[0]


class CommitLog:
    """One writer at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.records, whole_nbytes = _read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._cut(whole_nbytes)
        sync_folder(path.parent)

    def append(self, commit: Commit) -> None:
        """Returns once it would survive a power cut. Raises OSError, and leaves no part of a line, when it cannot."""
        if any(commit.step == record.step for record in self.records):
            raise ValueError(f"step {commit.step} is committed already")
        begin, line = self._file.tell(), msgspec.json.encode(commit) + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(f"{self._path} could not be written whole")
            os.fsync(self._file.fileno())
        except OSError:
            self._cut(begin)
            raise
        self.records.append(commit)

    def _cut(self, nbytes: int) -> None:
        self._file.truncate(nbytes)
        self._file.seek(0, os.SEEK_END)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read(path: Path) -> tuple[list[Commit], int]:
    """And how many bytes are whole lines."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found: list[Commit] = []
    nbytes = 0
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                break
            commit = _DECODER.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise UserError(f"line {number} of {path} cannot be read: {error}; put the file back as it was") from None
        if any(commit.step == earlier.step for earlier in found):
            raise UserError(f"line {number} of {path} commits step {commit.step} again: put the file back as it was")
        found.append(commit)
        nbytes += len(line)
    return found, nbytes
