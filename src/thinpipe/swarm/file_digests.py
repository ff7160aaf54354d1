"""What the files of a hub are: hashed in a thread, once for each content, however many ask."""

import asyncio
import os
from pathlib import Path
from weakref import WeakValueDictionary

from thinpipe.core.files import file_sha256

_MOST_REMEMBERED = 4096


class PathLocks:
    """A lock for each path, as long as somebody uses it. Who asks first has it first."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, path: Path) -> asyncio.Lock:
        return self._locks.setdefault(path, asyncio.Lock())


class Digests:
    def __init__(self) -> None:
        self._locks = PathLocks()
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    async def of(self, path: Path) -> tuple[int, str]:
        """Size and sha256; an OSError if it cannot be read."""
        async with self._locks[path]:
            status = await asyncio.to_thread(os.stat, path)
            content = (status.st_mtime_ns, status.st_size, status.st_ino)
            known, sha256 = self._known.get(path, (None, ""))
            if known != content:
                sha256 = await asyncio.to_thread(file_sha256, path)
                self._known.pop(path, None)
                self._known[path] = (content, sha256)
                if len(self._known) > _MOST_REMEMBERED:
                    del self._known[next(iter(self._known))]
            return status.st_size, sha256
