"""The commit log on the hub's disk, append-only, one JSON object per line.

A record is written after its checkpoint is durable and before any peer learns of the commit. A crash may truncate the
last line: the line is dropped, and the record of the checkpoint, which is complete, is written again. Nothing else is
removed; a record takes some 150 bytes per checkpoint file.
"""

import errno
import io
import os
from pathlib import Path

import msgspec

from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.files import sync_folder
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory

COMMIT_LOG_FILE = "commits.jsonl"
_DECODER = msgspec.json.Decoder(Commit)


class CommitLog:
    """Reads the log when created; call `open` before `append`. One writer at a time.

    `max_records`: see `CommitHistory`. Raises UserError if the log is damaged.
    """

    def __init__(self, path: Path, *, max_records: int = 0) -> None:
        self._path = path
        self.history = CommitHistory(max_records=max_records)
        self._nbytes = _read(path, self.history)

    def open(self) -> None:
        """Opens the log for appending and removes a truncated last line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._truncate(self._nbytes)
        sync_folder(self._path.parent)

    def append(self, commit: Commit) -> None:
        """Returns when the record is durable. If writing fails, raises OSError and leaves no partial line."""
        if not self.history.accepts(commit):
            raise ValueError(f"step {commit.step} is committed already")
        begin, line = self._file.tell(), msgspec.json.encode(commit) + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fsync(self._file.fileno())
        except OSError:
            self._truncate(begin)
            raise
        self.history.add(commit)

    def _truncate(self, nbytes: int) -> None:
        self._file.truncate(nbytes)
        self._file.seek(0, os.SEEK_END)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read(path: Path, history: CommitHistory) -> int:
    """Adds all records to `history` and returns the number of bytes of complete lines. Raises UserError if any line but
    the last is invalid."""
    nbytes = 0
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        for number, line in enumerate(file, 1):
            try:
                if not line.endswith(b"\n"):
                    break
                commit = _DECODER.decode(line)
            except DECODE_ERRORS as error:
                if not file.read(1):
                    break
                raise UserError(
                    f"line {number} of {path} is damaged ({error}): restore the file from a backup"
                ) from None
            if not history.accepts(commit):
                raise UserError(
                    f"line {number} of {path} commits step {commit.step} a second time: restore the file from a backup"
                )
            history.add(commit)
            nbytes += len(line)
    return nbytes
