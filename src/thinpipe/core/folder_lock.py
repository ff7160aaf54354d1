"""Exclusive lock of a folder. Without it, two nats-servers on one store, or two runs in one folder, would both start
and silently destroy each other's data.

The lock belongs to the open file description, not to the process. On POSIX the nats-server inherits it from the hub, so
the folder stays locked until the server has exited too, even if the hub was killed.
"""

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinpipe.core.errors import UserError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOG = logging.getLogger(__name__)

_WAIT_SECONDS = 8.0
"""Time to wait for the lock, in seconds: longer than the supervisor gives the nats-server of a killed hub to exit."""


_IN_USE = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_HUB = "another hub, or by a server one has left behind: stop that one first, or choose another folder"


class FolderLock:
    """Exclusive lock of a folder, held from construction until `release` or the end of the process.

    Construction blocks for up to `_WAIT_SECONDS`, then raises UserError; `in_use_by` completes its message "FOLDER is
    in use by ...". Raises OSError where the file system does not support locks.
    """

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
        """File descriptors to pass to a child process (`pass_fds`) so that it shares the lock."""
        return () if sys.platform == "win32" else (self._file,)

    def release(self) -> None:
        """Releases the lock in this process; child processes that inherited the lock keep it."""
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


@contextmanager
def run_lock(folder: Path, in_use_by: str, *, private: bool = False) -> Iterator[FolderLock | None]:
    """Creates and locks a run's folder for the duration of the block. `in_use_by` as in `FolderLock`.

    `private`: nobody but its owner may enter the folder, also if it was there before: data, weights and logs of others.
    Yields None, after a logged warning, if the file system does not support locks: training goes on without one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if private:
        folder.chmod(0o700)
    lock: FolderLock | None = None
    try:
        lock = FolderLock(folder, in_use_by=in_use_by)
    except OSError as error:
        _LOG.warning("%s cannot be locked (%s): see to it yourself that no other run uses it", folder, error.strerror)
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()
