"""What a hub keeps on its disk beside keys and checkpoints: started again, it goes on where it was."""

from contextlib import suppress
from pathlib import Path

import msgspec

from thinpipe.core.files import write_atomically


class EpochFile:
    """The number of the last epoch, on the disk before anybody hears of it: epochs only grow, whatever happens."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        return int(self._path.read_text()) if self._path.exists() else 0

    def write(self, number: int) -> None:
        write_atomically(self._path, str(number).encode())


class LineFile:
    """What the hub's line was measured to do, up and down: a hub that was started again need not measure it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[float, float] | None:
        with suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[float, float])
        return None

    def write(self, bps: tuple[float, float]) -> None:
        if self.read() != bps:
            write_atomically(self._path, msgspec.json.encode(bps))
