"""A full disk does not end a process: the process reports it and waits until there is free space again."""

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_MIN_FREE_NBYTES, _POLL_SECONDS = 16 << 20, 1.0


class DiskFullError(Exception):
    """Work was abandoned because this machine's disk is full; retry it after `wait_for_disk_space`."""


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, or the `__cause__` of an error that is no OSError, is a full disk or an exceeded quota."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _DISK_FULL_ERRNOS


def wait_for_disk_space(folder: Path, print_line: Callable[[str], None], *, who: str) -> None:
    """Blocks until the disk of `folder` has enough free space, polling. Prints one warning, if it has to wait.

    `who` names the waiting process in the warning, for example "the hub".
    """
    folder.mkdir(parents=True, exist_ok=True)
    warned = False
    while (free := shutil.disk_usage(folder).free) < _MIN_FREE_NBYTES:
        if not warned:
            print_line(
                f"the disk of {folder} is full ({free / 1e6:.1f} MB free): free at least "
                f"{_MIN_FREE_NBYTES / 1e6:.0f} MB, plus space for the checkpoints; {who} waits until then"
            )
        warned = True
        time.sleep(_POLL_SECONDS)
