"""Small files with which a restarted hub resumes: generation number and measured rates of its link.

Keys are stored by the broker, commits by `hub.commits`.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.files import write_atomically


class GenerationFile:
    """Number of the newest generation. Written before any peer learns of the generation, so that numbers never
    repeat."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """The stored number; 0: no generation has begun. Raises UserError if the file is damaged."""
        if not self._path.exists():
            return 0
        try:
            return int(self._path.read_bytes())
        except ValueError:
            raise UserError(
                f"{self._path} is damaged: restore it from a backup, or write into it a number above that of the last "
                "generation in events.jsonl"
            ) from None

    def write(self, number: int) -> None:
        write_atomically(self._path, str(number).encode())


class LinkFile:
    """Measured uplink and downlink rates of the hub in bits per second, so that a restarted hub need not measure
    again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[float, float] | None:
        """The stored rates; None: no readable file."""
        with suppress(FileNotFoundError, *DECODE_ERRORS):
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[float, float])
        return None

    def write(self, bps: tuple[float, float]) -> None:
        if self.read() != bps:
            write_atomically(self._path, msgspec.json.encode(bps))
