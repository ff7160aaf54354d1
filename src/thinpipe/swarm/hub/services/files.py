"""The hub's file services: serve files that peers may fetch, and receive files that the hub expects from peers.

The callers decide which names exist and where the files are; names with path traversal are refused while a request is
decoded.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec

from thinpipe.core.files import file_sha256
from thinpipe.core.foreign import decode_foreign
from thinpipe.swarm.hub.services.serve import Refusal
from thinpipe.swarm.protocol.file_messages import (
    MAX_IN_FLIGHT,
    BeginWrite,
    ReadChunk,
    ReadReply,
    ReadRequest,
    WriteReply,
    WriteRequest,
)
from thinpipe.swarm.protocol.partial_file import PartialFile

_UNEXPECTED = WriteReply(reason="the hub does not expect this file from this peer")
_BUSY = f"more than {MAX_IN_FLIGHT} requests of this peer are in flight"


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """A part of a file that peers fetch as a file of its own."""

    path: Path
    offset: int
    nbytes: int
    sha256: str
    """Of the part."""


Find = Callable[[str], Path | FileRange | None]
"""The file with this name; None if there is none."""


@dataclass(frozen=True, kw_only=True)
class ExpectedFile:
    """A file that the hub accepts from a peer."""

    target: Path
    nbytes: int
    sha256: str


Accept = Callable[[str, str], ExpectedFile | None]
"""(peer, name): the expected file if this peer may upload it, else None. Called for every chunk."""
OnFileSaved = Callable[[str, str], None]
"""(peer, name): the file is complete. Called again if the peer asks again."""
OnSaveFailed = Callable[[str, str, str], None]
"""(peer, name, reason): a chunk could not be written."""


class FileReadService:
    """Serves `read_file` requests."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._digests, self._in_flight = FileDigests(), _InFlightLimit()

    async def __call__(self, peer: str, data: bytes) -> bytes | None:
        request = decode_foreign(data, ReadRequest)
        with self._in_flight.take(peer) as admitted:
            return msgspec.msgpack.encode(await self._answer(request) if admitted else ReadReply(reason=_BUSY))

    async def _answer(self, request: ReadRequest) -> ReadReply:
        found = self._find(request.name)
        if found is None:
            return ReadReply(reason="the hub has no such file")
        try:
            if isinstance(request, ReadChunk):
                return await asyncio.to_thread(_read, found, request)
            if isinstance(found, FileRange):
                return ReadReply(nbytes=found.nbytes, sha256=found.sha256)
            nbytes, sha256 = await self._digests.of(found)
            return ReadReply(nbytes=nbytes, sha256=sha256)
        except OSError as error:
            return ReadReply(reason=f"the hub cannot read the file ({_error_text(error)})")


class FileWriteService:
    """Serves `write_file` requests. Chunks are written in order of arrival, each only if it continues the stored
    data."""

    def __init__(self, accept: Accept, on_file_saved: OnFileSaved, on_save_failed: OnSaveFailed | None = None) -> None:
        self._accept, self._on_file_saved, self._on_save_failed = accept, on_file_saved, on_save_failed
        self._locks, self._digests, self._in_flight = PathLocks(), FileDigests(), _InFlightLimit()

    async def __call__(self, peer: str, data: bytes) -> bytes | None:
        request = decode_foreign(data, WriteRequest)
        with self._in_flight.take(peer) as admitted:
            answer = await self._answer(peer, request) if admitted else WriteReply(reason=_BUSY)
        reply = msgspec.msgpack.encode(answer)
        return Refusal(reply) if answer is _UNEXPECTED else reply

    async def _answer(self, peer: str, request: WriteRequest) -> WriteReply:
        expected = self._accept(peer, request.name)
        if expected is None:
            return _UNEXPECTED
        # No await since the request arrived, and the lock is fair: chunks keep their order.
        async with self._locks[expected.target]:
            try:
                if await self._is_stored(expected):
                    answer = WriteReply(stored_nbytes=expected.nbytes, complete=True)
                else:
                    answer = await asyncio.to_thread(_write, expected, request, peer)
            except OSError as error:
                answer = WriteReply(reason=f"the hub cannot write the file ({_error_text(error)})")
                if self._on_save_failed is not None:
                    self._on_save_failed(peer, request.name, _error_text(error))
        if answer.complete:
            self._on_file_saved(peer, request.name)
        return answer

    async def _is_stored(self, expected: ExpectedFile) -> bool:
        try:
            if expected.target.stat().st_size != expected.nbytes:
                return False
            return await self._digests.of(expected.target) == (expected.nbytes, expected.sha256)
        except FileNotFoundError:
            return False


class _InFlightLimit:
    """Limits the unanswered requests of one peer, and so the memory that it can occupy at the hub."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    @contextmanager
    def take(self, peer: str) -> Iterator[bool]:
        """Yields True if the peer is within its limit, and counts the request while the context is open."""
        if self._taken[peer] >= MAX_IN_FLIGHT:
            yield False
            return
        self._taken[peer] += 1
        try:
            yield True
        finally:
            self._taken[peer] -= 1


def _read(found: Path | FileRange, request: ReadChunk) -> ReadReply:
    path, begins = (found, 0) if isinstance(found, Path) else (found.path, found.offset)
    with path.open("rb") as file:
        nbytes = found.nbytes if isinstance(found, FileRange) else file.seek(0, 2)
        file.seek(begins + request.offset)
        return ReadReply(nbytes=nbytes, data=file.read(max(0, min(request.nbytes, nbytes - request.offset))))


def _write(expected: ExpectedFile, request: WriteRequest, peer: str) -> WriteReply:
    """Writes a chunk, or reports what is stored, and finishes the file when it is complete. Runs in a worker thread."""
    file = PartialFile(expected.target, nbytes=expected.nbytes, sha256=expected.sha256, sender=peer)
    stored_nbytes = file.stored_nbytes()
    if isinstance(request, BeginWrite):
        if request.nbytes != expected.nbytes:
            return WriteReply(
                stored_nbytes=stored_nbytes,
                reason=f"the hub expects {expected.nbytes} bytes, and the file has {request.nbytes}",
            )
    elif request.offset == stored_nbytes:
        if stored_nbytes + len(request.data) > expected.nbytes:
            return WriteReply(stored_nbytes=stored_nbytes, reason=f"the hub expects at most {expected.nbytes} bytes")
        stored_nbytes = file.append(request.data)
    if stored_nbytes < expected.nbytes:
        return WriteReply(stored_nbytes=stored_nbytes)
    if not file.finish():
        return WriteReply(reason="the received data has a wrong sha256 and was deleted")
    return WriteReply(stored_nbytes=stored_nbytes, complete=True)


def _error_text(error: OSError) -> str:
    """The error without the hub's paths, which peers need not see."""
    return error.strerror or type(error).__name__


_MAX_CACHED = 4096
"""Maximum number of cached digests."""


class PathLocks:
    """One asyncio lock per path, which exists while it is in use; waiters get it in order."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[Path, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, path: Path) -> asyncio.Lock:
        return self._locks.setdefault(path, asyncio.Lock())


class FileDigests:
    """Cache of sha256 digests, invalidated when a file's mtime, size or inode changes."""

    def __init__(self) -> None:
        self._hashing = asyncio.Lock()
        """One file at a time is read: whoever asks for many must not take all threads of the hub."""
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}

    async def of(self, path: Path) -> tuple[int, str]:
        """Size in bytes and sha256 of the file. Raises OSError if the file cannot be read."""
        content = await _content(path)
        known, sha256 = self._known.get(path, (None, ""))
        if known == content:
            return content[1], sha256
        async with self._hashing:
            content = await _content(path)
            known, sha256 = self._known.get(path, (None, ""))
            if known != content:
                sha256 = await asyncio.to_thread(file_sha256, path)
                self._known.pop(path, None)
                self._known[path] = (content, sha256)
                if len(self._known) > _MAX_CACHED:
                    del self._known[next(iter(self._known))]
        return content[1], sha256


async def _content(path: Path) -> tuple[int, int, int]:
    """What changes with the content of a file; the second number is its size in bytes."""
    status = await asyncio.to_thread(os.stat, path)
    return status.st_mtime_ns, status.st_size, status.st_ino
