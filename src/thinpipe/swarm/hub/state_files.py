"""Small files with which a restarted hub resumes: generation number and measured rates of its link.

Keys are stored by the broker, commits by `hub.commits`.
"""

from pathlib import Path

import msgspec

from thinpipe.core.bounds import GenerationNumber, HubRate
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.foreign import ProtocolError, decode_foreign


class GenerationFile:
    """Number of the newest generation. Written before any peer learns of the generation, so that numbers never
    repeat."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """The stored number; 0: no generation has begun. Raises UserError if the file is damaged or cannot be read."""
        try:
            return decode_foreign(self._path.read_bytes(), GenerationNumber, form="json")
        except FileNotFoundError:
            return 0
        except ProtocolError:
            raise UserError(
                f"{self._path} is damaged: restore it from a backup, or write into it a number above that of the last "
                "generation in events.jsonl"
            ) from None
        except OSError as error:
            raise UserError(f"{self._path} cannot be read ({error.strerror or error}): make it readable") from None

    def write(self, number: int) -> None:
        write_atomically(self._path, str(number).encode())


class LinkFile:
    """Measured uplink and downlink rates of the hub in bits per second, so that a restarted hub need not measure
    again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[float, float] | None:
        """The stored rates; None: no readable file, so they are measured again."""
        try:
            return decode_foreign(self._path.read_bytes(), tuple[HubRate, HubRate], form="json")
        except OSError:  # ProtocolError is one
            return None

    def write(self, bps: tuple[float, float]) -> None:
        if self.read() != bps:
            write_atomically(self._path, msgspec.json.encode(bps))
