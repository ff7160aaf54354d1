"""File transfer of a peer: `fetch` downloads from the hub, `push` uploads to it; both resume an interrupted transfer.

Several chunks are in flight at once, so that latency does not limit the rate. Raises ConnectionError if the hub is
lost, TimeoutError if it does not answer in time, and FileTransferError otherwise.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from thinpipe.core.foreign import MAX_NBYTES, ProtocolError
from thinpipe.swarm.peer.request_pipeline import FileTransferError, RateLimiter, RequestPipeline
from thinpipe.swarm.protocol.file_messages import (
    MAX_CHUNK_NBYTES,
    MAX_IN_FLIGHT,
    READ_SERVICE,
    WRITE_SERVICE,
    BeginWrite,
    ReadChunk,
    ReadReply,
    StatFile,
    WriteChunk,
    WriteReply,
)
from thinpipe.swarm.protocol.partial_file import PartialFile
from thinpipe.transport.nats.connection import HubConnection

OnProgress = Callable[[int, int], None]
"""(stored, total): progress in bytes, called after each chunk."""
_CHUNK_NBYTES = 256 << 10
"""Chunk size of a push in bytes. Small, because messages of the pipeline queue behind a chunk on the slow uplink."""
_MAX_ATTEMPTS = 8
"""Maximum number of consecutive attempts to resume a push without the hub storing any of the data."""


def stat(connection: HubConnection, name: str, *, seconds: float = 60.0) -> ReadReply:
    """Size and sha256 of a file at the hub. `seconds`: timeout."""
    with RequestPipeline(connection, READ_SERVICE, seconds) as requests:
        requests.submit(StatFile(name=name))
        return requests.next_read_reply(name)


def stat_message(connection: HubConnection, name: str) -> ReadReply:
    """Size and sha256 of a file that is decoded whole. Raises ProtocolError if it is longer than a message may be,
    before any of it is downloaded."""
    found = stat(connection, name)
    if found.nbytes > MAX_NBYTES:
        raise ProtocolError(f"the hub's {name} has {found.nbytes} bytes, more than the {MAX_NBYTES} allowed")
    return found


def fetch(
    connection: HubConnection,
    name: str,
    target: Path,
    *,
    nbytes: int,
    sha256: str,
    progress: OnProgress | None = None,
    seconds: float = 60.0,
    window: int = 4,
    chunk_nbytes: int = MAX_CHUNK_NBYTES,
    rate_limiter: RateLimiter | None = None,
) -> None:
    """Downloads a file; when this returns, it is complete and durable. A complete target is not requested again.

    `seconds` is the timeout of each chunk, `window` the number of chunks in flight. `rate_limiter` caps the rate and
    may be shared by several transfers.
    """
    file = PartialFile(target, nbytes=nbytes, sha256=sha256)
    with _local_disk_errors(target):
        if file.is_complete():
            return
        stored_nbytes = file.stored_nbytes()
    chunks = _ChunkReader(seconds, window, min(chunk_nbytes, MAX_CHUNK_NBYTES), rate_limiter or RateLimiter(None))
    for data in chunks.of(connection, name, file, stored_nbytes):
        with _local_disk_errors(target):
            stored_nbytes = file.append(data)
        if progress is not None:
            progress(stored_nbytes, nbytes)
    with _local_disk_errors(target):
        complete = file.finish()
    if not complete:
        raise FileTransferError(f"{name} arrived with a wrong sha256 and was deleted: download it again")


@dataclass(frozen=True)
class _ChunkReader:
    """Parameters of a download: timeout per chunk in seconds, chunks in flight, chunk size and rate limit."""

    seconds: float
    window: int
    nbytes: int
    rate_limiter: RateLimiter

    def of(self, connection: HubConnection, name: str, file: PartialFile, stored_nbytes: int) -> Iterator[bytes]:
        """Chunks of the file from `stored_nbytes` on, in order. Raises FileTransferError if the file has changed at the
        hub."""
        left = deque(range(stored_nbytes, file.nbytes, self.nbytes))
        lengths: deque[int] = deque()
        with RequestPipeline(connection, READ_SERVICE, self.seconds) as requests:
            while left or lengths:
                while left and len(lengths) < _bounded(self.window):
                    offset = left.popleft()
                    lengths.append(min(self.nbytes, file.nbytes - offset))
                    self.rate_limiter.wait(lengths[-1])
                    requests.submit(ReadChunk(name=name, offset=offset, nbytes=lengths[-1]))
                answer = requests.next_read_reply(name)
                if answer.nbytes != file.nbytes or len(answer.data) != lengths.popleft():
                    file.discard()
                    raise FileTransferError(f"{name} has changed at the hub during the download: download it again")
                yield answer.data


def push(
    connection: HubConnection,
    path: Path,
    name: str,
    *,
    progress: OnProgress | None = None,
    seconds: float = 60.0,
    window: int = 8,
    rate_limiter: RateLimiter | None = None,
) -> None:
    """Uploads a file; when this returns, the hub has it complete and durable.

    `seconds` is the timeout of each chunk of 256 KiB, `window` the number of chunks in flight. `rate_limiter` caps the
    rate and may be shared by several transfers.
    """
    rate_limiter = rate_limiter or RateLimiter(None)
    with path.open("rb") as file, RequestPipeline(connection, WRITE_SERVICE, seconds) as requests:
        nbytes = file.seek(0, 2)
        requests.submit(BeginWrite(name=name, nbytes=nbytes))
        answer, tries = requests.next_write_reply(name), 0
        while not answer.complete:
            before = answer.stored_nbytes
            for answer in _send_from(before, file, nbytes, name, requests, _bounded(window), rate_limiter):
                if progress is not None:
                    progress(answer.stored_nbytes, nbytes)
            tries = 0 if answer.stored_nbytes > before else tries + 1
            if tries > _MAX_ATTEMPTS and not answer.complete:
                raise FileTransferError(
                    f"the hub stores no more of {name} after {_MAX_ATTEMPTS} attempts: check that no other process "
                    "uploads the same file"
                )


def _send_from(
    at: int, file: BinaryIO, nbytes: int, name: str, requests: RequestPipeline, window: int, rate_limiter: RateLimiter
) -> Iterator[WriteReply]:
    """Sends chunks from offset `at` on and yields the replies. Stops sending when the hub has stored more or less than
    expected: the last reply says where to resume."""
    ends: deque[int] = deque()
    in_sequence = True
    while True:
        while in_sequence and at < nbytes and len(ends) < window and not requests.next_is_ready:
            file.seek(at)
            data = file.read(min(_CHUNK_NBYTES, nbytes - at))
            if not data:
                raise FileTransferError(f"{file.name} became shorter during the upload: upload it again")
            rate_limiter.wait(len(data))
            requests.submit(WriteChunk(name=name, offset=at, data=data))
            at += len(data)
            ends.append(at)
        if not ends:
            return
        answer = requests.next_write_reply(name)
        in_sequence = ends.popleft() == answer.stored_nbytes and in_sequence
        yield answer


def _bounded(window: int) -> int:
    return max(1, min(window, MAX_IN_FLIGHT))


@contextmanager
def _local_disk_errors(target: Path) -> Iterator[None]:
    """Turns an OSError of the local disk into a FileTransferError."""
    try:
        yield
    except OSError as error:
        raise FileTransferError(
            f"{target} cannot be written ({error.strerror or error}): fix this, then download the file again"
        ) from error
