"""A peer's questions about files: many under way, answers in order, refusals as errors, and no faster than told."""

import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import Self

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.swarm.file_requests import FILE_ANSWERS, KEEP_ANSWERS, FileAnswer, KeepAnswer, Message, decode
from thinpipe.transport.nats.post import Post


class FileTransferError(UserError):
    """The hub refused, or what arrived is not what was promised."""


class Asks:
    """Questions to one service; answers are taken in the order in which they were asked. Unwanted ones are left."""

    def __init__(self, post: Post, service: str, seconds: float) -> None:
        self._post, self._service, self._seconds = post, service, seconds
        self._under_way: deque[Future[bytes]] = deque()

    def ask(self, request: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(request)
        self._under_way.append(self._post.ask(self._service, data, seconds=self._seconds, bulk=True))

    @property
    def answered(self) -> bool:
        """Whether the next answer is there, or will never be."""
        return bool(self._under_way) and self._under_way[0].done()

    def file_answer(self, name: str) -> FileAnswer:
        answer = self._next(FILE_ANSWERS)
        if answer.reason:
            raise FileTransferError(f"the hub does not give us {name}: {answer.reason}")
        return answer

    def keep_answer(self, name: str) -> KeepAnswer:
        answer = self._next(KEEP_ANSWERS)
        if answer.reason:
            raise FileTransferError(f"the hub does not keep our {name}: {answer.reason}")
        return answer

    def _next(self, decoder: msgspec.msgpack.Decoder[Message]) -> Message:
        answer = decode(decoder, self._post.take(self._under_way.popleft(), seconds=self._seconds))
        if answer is None:
            raise FileTransferError("the hub answers what we do not understand: use the same version of thinpipe")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for future in self._under_way:
            future.cancel()


class Pace:
    """Waits as long as a line of this rate would be busy with what it was given before. None: never."""

    def __init__(self, bytes_per_second: float | None) -> None:
        if bytes_per_second is not None and not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {bytes_per_second}: use a number above 0")
        self._rate = bytes_per_second
        self._free_at = time.monotonic()
        self._lifted = threading.Event()

    def lift(self) -> None:
        """Nobody else needs the line any more: who waits goes on at once."""
        self._lifted.set()

    def wait(self, nbytes: int) -> None:
        if self._rate is not None and not self._lifted.wait(max(0.0, self._free_at - time.monotonic())):
            self._free_at = max(self._free_at, time.monotonic()) + nbytes / self._rate
