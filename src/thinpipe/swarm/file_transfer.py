"""The peer's side of moving files: fetches from the hub, pushes to it; both go on where an earlier try has stopped.

Several pieces are under way at once, so that a distant hub is as fast as a near one. A hub that is lost is a
ConnectionError, one that does not answer in time a TimeoutError, all else a FileTransferError.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from thinpipe.swarm.file_asks import Asks, FileTransferError, Pace
from thinpipe.swarm.file_requests import (
    FILE,
    KEEP,
    MOST_AT_ONCE,
    MOST_NBYTES,
    Begin,
    Chunk,
    FileAnswer,
    KeepAnswer,
    Read,
    Stat,
)
from thinpipe.swarm.partial_file import PartialFile
from thinpipe.transport.nats.post import Post

Progress = Callable[[int, int], None]
"""So many bytes are there, of so many."""
_CHUNK_NBYTES = 256 << 10
"""Of a push. Small, since the messages of the pipeline wait behind it on an uplink, which is slow."""
_MOST_TRIES = 8
"""To go on from what the hub has, without any of it being taken."""


def stat(post: Post, name: str, *, seconds: float = 60.0) -> FileAnswer:
    """Size and sha256 of a file at the hub."""
    with Asks(post, FILE, seconds) as asks:
        asks.ask(Stat(name=name))
        return asks.file_answer(name)


def fetch(
    post: Post,
    name: str,
    target: Path,
    *,
    nbytes: int,
    sha256: str,
    progress: Progress | None = None,
    seconds: float = 60.0,
    window: int = 4,
    piece_nbytes: int = MOST_NBYTES,
    pace: Pace | None = None,
) -> None:
    """When this returns the file is there, whole and on the disk; if it was before, nothing is asked.

    `seconds` is the limit for each piece, `window` how many are under way. `pace` leaves the rest of the line to
    others; the same one for several files.
    """
    file = PartialFile(target, nbytes=nbytes, sha256=sha256)
    with _our_disk(target):
        if file.is_whole():
            return
        have = file.have()
    pieces = _Pieces(seconds, window, min(piece_nbytes, MOST_NBYTES), pace or Pace(None))
    for data in pieces.of(post, name, file, have):
        with _our_disk(target):
            have = file.append(data)
        if progress is not None:
            progress(have, nbytes)
    with _our_disk(target):
        whole = file.finish()
    if not whole:
        raise FileTransferError(f"{name} arrived with another sha256 than was promised and was deleted: fetch it again")


@dataclass(frozen=True)
class _Pieces:
    seconds: float
    window: int
    nbytes: int
    pace: Pace

    def of(self, post: Post, name: str, file: PartialFile, have: int) -> Iterator[bytes]:
        left = deque(range(have, file.nbytes, self.nbytes))
        lengths: deque[int] = deque()
        with Asks(post, FILE, self.seconds) as asks:
            while left or lengths:
                while left and len(lengths) < _bounded(self.window):
                    offset = left.popleft()
                    lengths.append(min(self.nbytes, file.nbytes - offset))
                    self.pace.wait(lengths[-1])
                    asks.ask(Read(name=name, offset=offset, nbytes=lengths[-1]))
                answer = asks.file_answer(name)
                if answer.nbytes != file.nbytes or len(answer.data) != lengths.popleft():
                    file.discard()
                    raise FileTransferError(f"{name} has changed at the hub: ask anew what it is, then fetch it again")
                yield answer.data


def push(
    post: Post,
    path: Path,
    name: str,
    *,
    progress: Progress | None = None,
    seconds: float = 60.0,
    window: int = 8,
    pace: Pace | None = None,
) -> None:
    """When this returns the hub has the file whole and on its disk.

    `seconds` is the limit for each piece of 256 KiB, `window` how many are under way. `pace`, which several
    pushes may share, leaves the rest of the line to others.
    """
    pace = pace or Pace(None)
    with path.open("rb") as file, Asks(post, KEEP, seconds) as asks:
        nbytes = file.seek(0, 2)
        asks.ask(Begin(name=name, nbytes=nbytes))
        answer, tries = asks.keep_answer(name), 0
        while not answer.whole:
            before = answer.have
            for answer in _send_from(before, file, nbytes, name, asks, _bounded(window), pace):
                if progress is not None:
                    progress(answer.have, nbytes)
            tries = 0 if answer.have > before else tries + 1
            if tries > _MOST_TRIES and not answer.whole:
                raise FileTransferError(f"the hub takes nothing more of {name}: see that nobody else sends it")


def _send_from(
    at: int, file: BinaryIO, nbytes: int, name: str, asks: Asks, window: int, pace: Pace
) -> Iterator[KeepAnswer]:
    """Stops sending when the hub has more or less than what was sent: the last answer says where to go on."""
    ends: deque[int] = deque()
    as_sent = True
    while True:
        while as_sent and at < nbytes and len(ends) < window and not asks.answered:
            file.seek(at)
            data = file.read(min(_CHUNK_NBYTES, nbytes - at))
            if not data:
                raise FileTransferError(f"{file.name} became shorter while it was sent: send it again")
            pace.wait(len(data))
            asks.ask(Chunk(name=name, offset=at, data=data))
            at += len(data)
            ends.append(at)
        if not ends:
            return
        answer = asks.keep_answer(name)
        as_sent = ends.popleft() == answer.have and as_sent
        yield answer


def _bounded(window: int) -> int:
    return max(1, min(window, MOST_AT_ONCE))


@contextmanager
def _our_disk(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileTransferError(
            f"{target} cannot be written ({error.strerror or error}): put that right, then fetch it again"
        ) from error
