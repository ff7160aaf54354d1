"""The hub's side of moving files: reads those that peers may have, writes those that it expects of them.

Which names exist, and where, is for the hub to say; a name that leads out of a folder is refused before it is asked.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from thinpipe.swarm.file_digests import Digests, PathLocks
from thinpipe.swarm.file_requests import (
    FILE_REQUESTS,
    KEEP_REQUESTS,
    MOST_AT_ONCE,
    Begin,
    Chunk,
    FileAnswer,
    KeepAnswer,
    Read,
    Stat,
    decode,
    is_plain,
)
from thinpipe.swarm.partial_file import PartialFile

_BUSY = f"it has more than {MOST_AT_ONCE} requests of ours under way"
Find = Callable[[str], Path | None]
"""The file of this name, if there is one."""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """A file that the hub wants."""

    target: Path
    nbytes: int
    sha256: str


Accept = Callable[[str, str], Accepted | None]
"""Whether this peer is to send a file of this name. Asked for every piece."""
Kept = Callable[[str, str], None]
"""This peer's file of this name is whole. Told again if the peer asks again."""
NotKept = Callable[[str, str, str], None]
"""A piece of this peer's file of this name could not be written, and why."""


class FileService:
    """Serves `file`."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._digests, self._turns = Digests(), _Turns()

    async def __call__(self, peer: str, data: bytes) -> bytes | None:
        asked = decode(FILE_REQUESTS, data)
        if asked is None:
            return None
        with self._turns.take(peer) as taken:
            return msgspec.msgpack.encode(await self._answer(asked) if taken else FileAnswer(reason=_BUSY))

    async def _answer(self, asked: Stat | Read) -> FileAnswer:
        path = self._find(asked.name) if is_plain(asked.name) else None
        if path is None:
            return FileAnswer(reason="it has no such file")
        try:
            if isinstance(asked, Read):
                return await asyncio.to_thread(_read, path, asked)
            nbytes, sha256 = await self._digests.of(path)
            return FileAnswer(nbytes=nbytes, sha256=sha256)
        except OSError as error:
            return FileAnswer(reason=f"it cannot read the file ({_why(error)})")


class KeepService:
    """Serves `keep`. Pieces are written in the order in which they came, each only if it follows what is there."""

    def __init__(self, accept: Accept, kept: Kept, not_kept: NotKept | None = None) -> None:
        self._accept, self._kept, self._not_kept = accept, kept, not_kept
        self._locks, self._digests, self._turns = PathLocks(), Digests(), _Turns()

    async def __call__(self, peer: str, data: bytes) -> bytes | None:
        asked = decode(KEEP_REQUESTS, data)
        if asked is None:
            return None
        with self._turns.take(peer) as taken:
            answer = await self._answer(peer, asked) if taken else KeepAnswer(reason=_BUSY)
        return msgspec.msgpack.encode(answer)

    async def _answer(self, peer: str, asked: Begin | Chunk) -> KeepAnswer:
        accepted = self._accept(peer, asked.name) if is_plain(asked.name) else None
        if accepted is None:
            return KeepAnswer(reason="it expects no such file from us")
        # Nothing was awaited since the request came, and waiters take this lock in turn: pieces keep their order.
        async with self._locks[accepted.target]:
            try:
                if await self._is_there(accepted):
                    answer = KeepAnswer(have=accepted.nbytes, whole=True)
                else:
                    answer = await asyncio.to_thread(_keep, accepted, asked)
            except OSError as error:
                answer = KeepAnswer(reason=f"it cannot write the file ({_why(error)})")
                if self._not_kept is not None:
                    self._not_kept(peer, asked.name, _why(error))
        if answer.whole:
            self._kept(peer, asked.name)
        return answer

    async def _is_there(self, accepted: Accepted) -> bool:
        try:
            if accepted.target.stat().st_size != accepted.nbytes:
                return False
            return await self._digests.of(accepted.target) == (accepted.nbytes, accepted.sha256)
        except FileNotFoundError:
            return False


class _Turns:
    """Bounds what one peer can make the hub hold."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()

    @contextmanager
    def take(self, peer: str) -> Iterator[bool]:
        if self._taken[peer] >= MOST_AT_ONCE:
            yield False
            return
        self._taken[peer] += 1
        try:
            yield True
        finally:
            self._taken[peer] -= 1


def _read(path: Path, asked: Read) -> FileAnswer:
    with path.open("rb") as file:
        nbytes = file.seek(0, 2)
        file.seek(asked.offset)
        return FileAnswer(nbytes=nbytes, data=file.read(asked.nbytes))


def _keep(accepted: Accepted, asked: Begin | Chunk) -> KeepAnswer:
    file = PartialFile(accepted.target, nbytes=accepted.nbytes, sha256=accepted.sha256)
    have = file.have()
    if isinstance(asked, Begin):
        if asked.nbytes != accepted.nbytes:
            return KeepAnswer(
                have=have, reason=f"it expects a file of {accepted.nbytes} bytes, and ours has {asked.nbytes}"
            )
    elif asked.offset == have:
        if have + len(asked.data) > accepted.nbytes:
            return KeepAnswer(have=have, reason=f"it expects no more than {accepted.nbytes} bytes")
        have = file.append(asked.data)
    if have < accepted.nbytes:
        return KeepAnswer(have=have)
    if not file.finish():
        return KeepAnswer(reason="what arrived has another sha256 than it expects and was deleted")
    return KeepAnswer(have=have, whole=True)


def _why(error: OSError) -> str:
    """Without the hub's paths."""
    return error.strerror or type(error).__name__
