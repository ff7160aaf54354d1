"""A disk that is full ends no program: it says so and waits until somebody has made room."""

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_ROOM_NBYTES, _LOOK_SECONDS = 16 << 20, 1.0


class NoRoomError(Exception):
    """Work that cannot go on before there is room on this machine's disk."""


def says_no_room(error: BaseException) -> bool:
    """Also one that was raised for that reason."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _NO_ROOM


def wait_for_room(folder: Path, say: Callable[[str], None], *, who: str) -> None:
    """`who` waits: "the hub"."""
    folder.mkdir(parents=True, exist_ok=True)
    told = False
    while (free := shutil.disk_usage(folder).free) < _ROOM_NBYTES:
        if not told:
            say(
                f"the disk of {folder} is full ({free / 1e6:.1f} MB free): make room for at least "
                f"{_ROOM_NBYTES / 1e6:.0f} MB and for the checkpoints; {who} waits for it"
            )
        told = True
        time.sleep(_LOOK_SECONDS)
