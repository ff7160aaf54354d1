"""The hub's list of commits on its disk, one JSON object a line: what was committed stays so, whatever happens.

A line is written after the checkpoint itself is durable and before anybody hears of it. A crash may cut the last line
short: it is dropped, and the checkpoint, which is whole, is written down again. Nothing else is removed: a line takes
some 150 bytes for each file of a checkpoint.
"""

import io
import os
from pathlib import Path

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.files import sync_folder
from thinpipe.swarm.commit_history import Commit, History

COMMITS = "commits.jsonl"
_DECODER = msgspec.json.Decoder(Commit)


class CommitLog:
    """Is read once, when it is made; `open` before anything is written. One writer at a time.

    `most`: see `History`.
    """

    def __init__(self, path: Path, *, most: int = 0) -> None:
        self._path = path
        self.history = History(most=most)
        self._nbytes = _read(path, self.history)

    def open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._cut(self._nbytes)
        sync_folder(self._path.parent)

    def append(self, commit: Commit) -> None:
        """Returns once it would survive a power cut. Raises OSError, and leaves no part of a line, when it cannot."""
        if not self.history.fits(commit):
            raise ValueError(f"step {commit.step} is committed already")
        begin, line = self._file.tell(), msgspec.json.encode(commit) + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(f"{self._path} could not be written whole")
            os.fsync(self._file.fileno())
        except OSError:
            self._cut(begin)
            raise
        self.history.add(commit)

    def _cut(self, nbytes: int) -> None:
        self._file.truncate(nbytes)
        self._file.seek(0, os.SEEK_END)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read(path: Path, history: History) -> int:
    """Returns how many bytes are whole lines. Raises UserError if any line but the last cannot be read."""
    nbytes = 0
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        for number, line in enumerate(file, 1):
            try:
                if not line.endswith(b"\n"):
                    break
                commit = _DECODER.decode(line)
            except msgspec.DecodeError as error:
                if not file.read(1):
                    break
                raise UserError(
                    f"line {number} of {path} cannot be read: {error}; put the file back as it was"
                ) from None
            if not history.fits(commit):
                raise UserError(
                    f"line {number} of {path} commits step {commit.step} again: put the file back as it was"
                )
            history.add(commit)
            nbytes += len(line)
    return nbytes
