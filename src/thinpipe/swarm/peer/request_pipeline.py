"""Pipelined requests of a peer to a file service, and a rate limiter for them."""

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Self, TypeVar

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.foreign import decode_foreign
from thinpipe.swarm.protocol.file_messages import (
    ReadReply,
    WriteReply,
)
from thinpipe.transport.nats.connection import HubConnection

Reply = TypeVar("Reply", ReadReply, WriteReply)


class FileTransferError(UserError):
    """The hub refused a request, or received data does not match what was announced."""


class RequestPipeline:
    """Pipelined requests to one service; replies are taken in the order of the requests. Requests still in flight are
    cancelled on exit. `seconds`: timeout of each request."""

    def __init__(self, connection: HubConnection, service: str, seconds: float) -> None:
        self._connection, self._service, self._seconds = connection, service, seconds
        self._in_flight: deque[Future[bytes]] = deque()

    def submit(self, request: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(request)
        self._in_flight.append(self._connection.submit(self._service, data, seconds=self._seconds, bulk=True))

    @property
    def next_is_ready(self) -> bool:
        """True if the reply to the oldest request has arrived or has failed."""
        return bool(self._in_flight) and self._in_flight[0].done()

    def next_read_reply(self, name: str) -> ReadReply:
        """Waits for the reply to the oldest request. Raises FileTransferError if it is a refusal."""
        answer = self._next(ReadReply)
        if answer.reason:
            raise FileTransferError(f"download of {name} refused: {answer.reason}")
        return answer

    def next_write_reply(self, name: str) -> WriteReply:
        """Waits for the reply to the oldest request. Raises FileTransferError if it is a refusal."""
        answer = self._next(WriteReply)
        if answer.reason:
            raise FileTransferError(f"upload of {name} refused: {answer.reason}")
        return answer

    def _next(self, kind: type[Reply]) -> Reply:
        return decode_foreign(self._connection.await_reply(self._in_flight.popleft(), seconds=self._seconds), kind)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._in_flight:
            future.cancel()


class RateLimiter:
    """Limits transfers to a rate in bytes per second; None: unlimited. `wait` blocks while a link of this rate would be
    busy with the data passed before."""

    def __init__(self, bytes_per_second: float | None) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}: must be above 0")
        self._rate = bytes_per_second
        self._free_at = time.monotonic()
        self._disabled = threading.Event()

    def disable(self) -> None:
        """Lifts the limit, from any thread; a blocked `wait` returns at once."""
        self._disabled.set()

    def wait(self, nbytes: int) -> None:
        """Blocks until the next `nbytes` bytes may be sent."""
        if self._rate is not None and not self._disabled.wait(max(0.0, self._free_at - time.monotonic())):
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
