"""Exclusive lock of a folder. Without it, two nats-servers on one store, or two runs in one folder, would both start
and silently destroy each other's data.

Whoever finds a running program in the folder is refused at once: the file says which program holds the lock, on which
machine. What a program that has ended has left behind is waited for.

The lock belongs to the open file description, not to the process. On POSIX the nats-server inherits it from the hub, so
the folder stays locked until the server has exited too, even if the hub was killed.
"""

import errno
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from thinpipe.core.errors import UserError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOG = logging.getLogger(__name__)

_WAIT_SECONDS = 8.0
"""Time to wait for the lock, in seconds: longer than the supervisor gives the nats-server of a killed hub to exit."""


_MAX_HOLDER_NBYTES = 300
_IN_USE = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)
_HUB = "another hub, or by a server one has left behind: stop that one first, or choose another folder"


class FolderLock:
    """Exclusive lock of a folder, held from construction until `release` or the end of the process.

    Raises UserError at once if the program that took the lock still runs on this machine, else after up to
    `_WAIT_SECONDS`; `in_use_by` completes its message "FOLDER is in use by ...". Raises OSError where the file system
    does not support locks.
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
            self._write_holder(f"{socket.gethostname()} {os.getpid()}")
        except BaseException:
            os.close(self._file)
            raise

    @property
    def inheritable(self) -> tuple[int, ...]:
        """File descriptors to pass to a child process (`pass_fds`) so that it shares the lock."""
        return () if sys.platform == "win32" else (self._file,)

    def release(self) -> None:
        """Releases the lock in this process; child processes that inherited the lock keep it."""
        self._write_holder("")
        os.close(self._file)

    def _wait(self, in_use: str) -> None:
        deadline, warned = time.monotonic() + _WAIT_SECONDS, False
        while not self._try():
            if self._holder_runs() or time.monotonic() > deadline:
                raise UserError(in_use)
            if not warned:
                _LOG.warning("waiting for up to %g s for a program that holds this folder and ends", _WAIT_SECONDS)
            warned = True
            time.sleep(0.05)

    def _write_holder(self, text: str) -> None:
        """From the second byte on: Windows lets nobody else read the locked first one."""
        with suppress(OSError):  # a full disk; the lock holds all the same
            os.ftruncate(self._file, 1)
            os.lseek(self._file, 1, os.SEEK_SET)
            os.write(self._file, text.encode())
            os.lseek(self._file, 0, os.SEEK_SET)

    def _holder_runs(self) -> bool:
        """True if the file names a program of this machine that runs."""
        try:
            os.lseek(self._file, 1, os.SEEK_SET)
            host, _, process = os.read(self._file, _MAX_HOLDER_NBYTES).decode(errors="replace").rpartition(" ")
            os.lseek(self._file, 0, os.SEEK_SET)
            if host != socket.gethostname():
                return False
            return bool(psutil.Process(int(process)).status() != psutil.STATUS_ZOMBIE)
        except (OSError, ValueError, psutil.Error):
            return False

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
