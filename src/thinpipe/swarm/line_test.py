"""How fast a peer's line to the hub is: round trips, and bytes a second each way.

Rates count payload, as `Traffic` does: what the line carries beside it (TCP/IP, TLS and the server's own words, about
5 %) is taken off already. Peers that measure at the same time share the hub's line, and see less of it.
"""

import os
import queue
import random
import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.swarm.reading import read

SERVICE = "line"
MOST_NBYTES = 1 << 20
"""Of an answer."""
PATIENCE_SECONDS = 10.0

_NOISE = os.urandom(2 * MOST_NBYTES)
"""Nothing on the way can make it shorter."""
_PIECE_NBYTES = 256 << 10
_FIRST_NBYTES = 16 << 10
_MOST_AHEAD_NBYTES = 16 << 20
_PIECES_AHEAD = 4
_WARM_UP_SECONDS = 2.0
_FULL_SECONDS = 0.1


class Asker(Protocol):
    """A `Post`, or a `GuestLine`."""

    def ask(self, service: str, data: bytes, *, seconds: float, bulk: bool = False) -> Future[bytes]: ...


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    answer_nbytes: Annotated[int, msgspec.Meta(ge=0, le=MOST_NBYTES)]
    payload: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Rates:
    up_bps: float
    down_bps: float


_DECODER = msgspec.msgpack.Decoder(Probe)


async def line_service(peer: str, data: bytes) -> bytes | None:  # noqa: ARG001  all peers may ask
    """The hub's part. The server limits how long a question may be."""
    asked = read(_DECODER, data)
    return None if asked is None else _noise(asked.answer_nbytes)


def measure_latency(post: Asker, *, rounds: int = 10, patience_seconds: float = PATIENCE_SECONDS) -> float:
    """Seconds of a round trip, in the median."""
    probe, times = msgspec.msgpack.encode(Probe(answer_nbytes=1)), []
    for _ in range(rounds):
        began = time.monotonic()
        _result(post.ask(SERVICE, probe, seconds=patience_seconds), 1, patience_seconds)
        times.append(time.monotonic() - began)
    return statistics.median(times)


def measure_rates(post: Asker, *, seconds_each: float = 1.5, patience_seconds: float = PATIENCE_SECONDS) -> Rates:
    """First up, then down; each takes at most about 3 seconds more than `seconds_each`. A piece that has not crossed
    after `patience_seconds` ends it with a UserError."""
    latency = measure_latency(post, rounds=3, patience_seconds=patience_seconds)
    up, down = (_Direction(post, up=up, latency=latency, patience_seconds=patience_seconds) for up in (True, False))
    return Rates(up_bps=up.measure(seconds_each), down_bps=down.measure(seconds_each))


def _result(answer: Future[bytes], nbytes: int, patience_seconds: float) -> None:
    try:
        answer.result(timeout=patience_seconds + 5)
    except TimeoutError:
        raise UserError(
            f"the line to the hub did not carry {nbytes} bytes there and back within {patience_seconds:g} seconds: "
            "it is too slow to train over, or busy with something else"
        ) from None


class _Direction:
    """Pieces under way in one direction. A piece has crossed when its answer is here."""

    def __init__(self, post: Asker, *, up: bool, latency: float, patience_seconds: float) -> None:
        self.post, self.up, self.patience_seconds = post, up, patience_seconds
        self.long_enough = _FULL_SECONDS + 2 * latency
        self.crossed: queue.SimpleQueue[tuple[float, int, Future[bytes]]] = queue.SimpleQueue()
        self.under_way = 0

    def measure(self, seconds: float) -> float:
        """Bits a second, while as many bytes are under way as the line was found to hold."""
        piece, ahead = self._warm_up()
        self._send(piece, ahead)
        began, _ = self._take()
        self._send(piece, 1)
        ended, nbytes = began, 0
        while ended - began < seconds:
            ended, crossed = self._take()
            nbytes += crossed
            self._send(piece, 1)
        while self.under_way:  # or they would be in the way of what is measured next
            self._take()
        return 8 * nbytes / (ended - began)

    def _warm_up(self) -> tuple[int, int]:
        """Twice as many bytes every time, until they take long enough to fill the line: the size of a piece, and how
        many to keep under way. TCP finds its pace meanwhile."""
        began, ahead_nbytes = time.monotonic(), _FIRST_NBYTES
        while True:
            piece = min(_PIECE_NBYTES, ahead_nbytes // _PIECES_AHEAD)
            sent = time.monotonic()
            self._send(piece, ahead_nbytes // piece)
            while self.under_way:
                now, _ = self._take()
            if now - sent >= self.long_enough or now - began >= _WARM_UP_SECONDS or ahead_nbytes >= _MOST_AHEAD_NBYTES:
                return piece, ahead_nbytes // piece
            ahead_nbytes *= 2

    def _send(self, nbytes: int, pieces: int) -> None:
        for _ in range(pieces):
            probe = Probe(answer_nbytes=1, payload=_noise(nbytes)) if self.up else Probe(answer_nbytes=nbytes)
            answer = self.post.ask(SERVICE, msgspec.msgpack.encode(probe), seconds=self.patience_seconds, bulk=True)
            # When it came is noted in the post's own thread, however late this one gets to look.
            answer.add_done_callback(lambda done: self.crossed.put((time.monotonic(), nbytes, done)))
            self.under_way += 1

    def _take(self) -> tuple[float, int]:
        """The next that crossed: when, and how many bytes."""
        when, nbytes, answer = self.crossed.get(timeout=self.patience_seconds + 5)
        self.under_way -= 1
        _result(answer, nbytes, self.patience_seconds)
        return when, nbytes


def _noise(nbytes: int) -> bytes:
    start = random.randrange(len(_NOISE) - nbytes + 1)
    return _NOISE[start : start + nbytes]
