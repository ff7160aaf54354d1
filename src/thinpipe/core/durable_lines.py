"""An append-only file of JSON objects, one a line, each durable when `append` returns.

A crash may truncate the last line: it is dropped, since nobody has relied on it. A file that is
damaged elsewhere is refused.
"""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.files import sync_folder

Record = TypeVar("Record")


class DurableLines(Generic[Record]):
    """Reads the file when created; call `open` before `append`. One writer at a time.

    `add` takes each record that is read, in order, and raises ValueError, with the reason, for one that cannot follow
    those before it. Raises UserError if the file is damaged.
    """

    def __init__(self, path: Path, kind: Any, add: Callable[[Record], None]) -> None:
        self._path = path
        self._nbytes = _read(path, msgspec.json.Decoder(kind), add)

    def open(self) -> None:
        """Opens the file for appending and removes a truncated last line."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab", buffering=0)
        self._truncate(self._nbytes)
        sync_folder(self._path.parent)

    def append(self, record: Record) -> None:
        """Returns when the record is durable. If writing fails, raises OSError and leaves no partial line."""
        begin, line = self._file.tell(), msgspec.json.encode(record) + b"\n"
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fsync(self._file.fileno())
        except OSError:
            self._truncate(begin)
            raise

    def _truncate(self, nbytes: int) -> None:
        self._file.truncate(nbytes)
        self._file.seek(0, os.SEEK_END)
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _read(path: Path, decoder: "msgspec.json.Decoder[Any]", add: Callable[[Any], None]) -> int:
    """Gives all records to `add` and returns the number of bytes of complete lines. Raises UserError if any line but
    the last is invalid."""
    nbytes = 0
    with path.open("rb") if path.exists() else io.BytesIO() as file:
        for number, line in enumerate(file, 1):
            try:
                if not line.endswith(b"\n"):
                    break
                record = decoder.decode(line)
            except DECODE_ERRORS as error:
                if not file.read(1):
                    break
                raise UserError(
                    f"line {number} of {path} is damaged ({error}): restore the file from a backup"
                ) from None
            try:
                add(record)
            except ValueError as error:
                raise UserError(f"line {number} of {path}: {error}: restore the file from a backup") from None
            nbytes += len(line)
    return nbytes
