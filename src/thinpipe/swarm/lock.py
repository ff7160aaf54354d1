"""One owner of a folder at a time. Two servers on one store would both start, and lose each other's data in silence;
so would two runs.

The lock is of the open file, not of the process: on POSIX the server inherits it, so the folder is free only when the
server is gone too, whatever became of the program that started it.
"""

import errno
import os
import sys
import time
from pathlib import Path

from thinpipe.core.errors import UserError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_WAIT_SECONDS = 8.0
"""For the server of a program that was killed a moment ago: more than its keeper gives it to end."""


_IN_USE = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_HUB = "another hub, or by a server one has left behind: stop that one first, or choose another folder"


class FolderLock:
    """Held from `__init__` to `release`, or to the end of the process, whatever ends it. `in_use_by` is what the user
    is told who is second: whom he has to stop. Raises OSError where files cannot be locked."""

    def __init__(self, folder: Path, in_use_by: str = _HUB) -> None:
        path = folder / "lock"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except PermissionError:
            raise UserError(
                f"{path} may not be opened: choose another folder, or let the owner of this one change its permissions"
            ) from None
        try:
            self._wait(f"{folder} is in use by {in_use_by}")
        except BaseException:
            os.close(self._file)
            raise

    @property
    def inheritable(self) -> tuple[int, ...]:
        """The descriptors that a process must be given to share the lock."""
        return () if sys.platform == "win32" else (self._file,)

    def release(self) -> None:
        """Those who inherited the lock keep it."""
        os.close(self._file)

    def _wait(self, in_use: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not self._try():
            if time.monotonic() > deadline:
                raise UserError(in_use)
            time.sleep(0.05)

    def _try(self) -> bool:
        try:
            if sys.platform == "win32":
                msvcrt.locking(self._file, msvcrt.LK_NBLCK, 1)
            else:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _IN_USE:
                raise
            return False
        return True
