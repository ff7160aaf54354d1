"""Keeps a second program out of a run's folder, where the file system can."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thinpipe.swarm.lock import FolderLock


@contextmanager
def alone_in(folder: Path, in_use_by: str) -> Iterator[FolderLock | None]:
    """Makes the folder. None where its files cannot be locked: that is no reason not to train. `in_use_by` is what the
    user is told who is second."""
    folder.mkdir(parents=True, exist_ok=True)
    lock: FolderLock | None = None
    try:
        lock = FolderLock(folder, in_use_by=in_use_by)
    except OSError as error:
        print(
            f"thinpipe: {folder} cannot be locked ({error.strerror}): see to it yourself that no other run uses it",
            file=sys.stderr,
        )
    try:
        yield lock
    finally:
        if lock is not None:
            lock.release()
