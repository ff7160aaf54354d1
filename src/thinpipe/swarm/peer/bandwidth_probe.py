"""Bandwidth probe: round-trip time and rates of a peer's link to the hub.

Rates count payload, as `Traffic` does: overhead of TCP/IP, TLS and NATS (about 5 %) is already excluded. Peers that
measure at the same time share the hub's link and see lower rates.
"""

import queue
import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.swarm.protocol.probe import PIECE_NBYTES, SERVICE, Probe, random_bytes

PROBE_TIMEOUT_SECONDS = 10.0
"""Timeout of one probe message, in seconds."""

_FIRST_NBYTES = 16 << 10
"""Bytes in flight at the start of the warm-up."""
_MAX_IN_FLIGHT_NBYTES = 16 << 20
_PIECES_IN_FLIGHT = 4
_WARM_UP_SECONDS = 2.0
_MAX_FAILED = 3
_MIN_FILL_SECONDS = 0.1
"""Seconds, in addition to two round trips, that the bytes in flight must take to count as filling the link."""


class Requester(Protocol):
    """Sends requests to the hub: a `HubConnection` or an `InviteProbe`."""

    def submit(self, service: str, data: bytes, *, seconds: float, bulk: bool = False) -> Future[bytes]: ...


@dataclass(frozen=True, kw_only=True)
class LinkRates:
    """Payload rates of a link in bits per second."""

    up_bps: float
    down_bps: float


class LinkMeter:
    """Measures the link of a program that connects again after an interruption."""

    def __init__(self) -> None:
        self._failed = 0

    def measure(
        self, connection: Requester, *, timeout_seconds: float = PROBE_TIMEOUT_SECONDS
    ) -> tuple[LinkRates, float]:
        """Rates, and latency in seconds. Raises TimeoutError if the link was interrupted meanwhile, and UserError if
        several measurements in a row failed while the hub answered before each."""
        try:
            rates = measure_rates(connection, timeout_seconds=timeout_seconds)
            latency = measure_latency(connection, timeout_seconds=timeout_seconds)
        except TimeoutError as error:
            self._failed += 1
            if self._failed >= _MAX_FAILED:
                raise UserError(str(error)) from error
            raise
        self._failed = 0
        return rates, latency


def measure_latency(
    connection: Requester, *, rounds: int = 10, timeout_seconds: float = PROBE_TIMEOUT_SECONDS
) -> float:
    """Median round-trip time in seconds."""
    probe, times = msgspec.msgpack.encode(Probe(answer_nbytes=1)), []
    for _ in range(rounds):
        began = time.monotonic()
        _result(connection.submit(SERVICE, probe, seconds=timeout_seconds), 1, timeout_seconds)
        times.append(time.monotonic() - began)
    return statistics.median(times)


def measure_rates(
    connection: Requester, *, seconds_each: float = 1.5, timeout_seconds: float = PROBE_TIMEOUT_SECONDS
) -> LinkRates:
    """Measures the uplink, then the downlink; each takes at most about 3 seconds more than `seconds_each`. Raises
    TimeoutError if a probe message is not answered within `timeout_seconds`."""
    latency = measure_latency(connection, rounds=3, timeout_seconds=timeout_seconds)
    up, down = (_Direction(connection, up=up, latency=latency, timeout_seconds=timeout_seconds) for up in (True, False))
    return LinkRates(up_bps=up.measure(seconds_each), down_bps=down.measure(seconds_each))


def _result(answer: Future[bytes], nbytes: int, timeout_seconds: float) -> None:
    """Waits for a reply. Raises TimeoutError."""
    try:
        answer.result(timeout=timeout_seconds + 5)
    except TimeoutError:
        raise TimeoutError(
            f"the link to the hub did not carry {nbytes} bytes and the reply within {timeout_seconds:g} s: it is "
            "interrupted, too slow to train over, or busy: stop other transfers"
        ) from None


class _Direction:
    """Probe messages in one direction. A message counts as delivered when its reply has arrived."""

    def __init__(self, connection: Requester, *, up: bool, latency: float, timeout_seconds: float) -> None:
        self.connection, self.up, self.timeout_seconds = connection, up, timeout_seconds
        self.min_seconds = _MIN_FILL_SECONDS + 2 * latency
        self.completed: queue.SimpleQueue[tuple[float, int, Future[bytes]]] = queue.SimpleQueue()
        self.in_flight = 0

    def measure(self, seconds: float) -> float:
        """Rate in bits per second, with as many bytes in flight as fill the link."""
        piece, n_in_flight = self._warm_up()
        self._send(piece, n_in_flight)
        began, _ = self._next_completed()
        self._send(piece, 1)
        ended, nbytes = began, 0
        while ended - began < seconds:
            ended, completed = self._next_completed()
            nbytes += completed
            self._send(piece, 1)
        while self.in_flight:  # leftovers would disturb the next measurement
            self._next_completed()
        return 8 * nbytes / (ended - began)

    def _warm_up(self) -> tuple[int, int]:
        """Doubles the bytes in flight until they take long enough to fill the link; TCP leaves slow start meanwhile.
        Returns the message size in bytes and the number of messages to keep in flight."""
        began, in_flight_nbytes = time.monotonic(), _FIRST_NBYTES
        while True:
            piece = min(PIECE_NBYTES, in_flight_nbytes // _PIECES_IN_FLIGHT)
            sent = time.monotonic()
            self._send(piece, in_flight_nbytes // piece)
            while self.in_flight:
                now, _ = self._next_completed()
            if (
                now - sent >= self.min_seconds
                or now - began >= _WARM_UP_SECONDS
                or in_flight_nbytes >= _MAX_IN_FLIGHT_NBYTES
            ):
                return piece, in_flight_nbytes // piece
            in_flight_nbytes *= 2

    def _send(self, nbytes: int, pieces: int) -> None:
        for _ in range(pieces):
            probe = Probe(answer_nbytes=1, payload=random_bytes(nbytes)) if self.up else Probe(answer_nbytes=nbytes)
            answer = self.connection.submit(
                SERVICE, msgspec.msgpack.encode(probe), seconds=self.timeout_seconds, bulk=True
            )
            # The arrival time is taken in the connection's thread, however late this thread reads it.
            answer.add_done_callback(lambda done: self.completed.put((time.monotonic(), nbytes, done)))
            self.in_flight += 1

    def _next_completed(self) -> tuple[float, int]:
        """Waits for the next delivered message: its time and its size in bytes."""
        when, nbytes, answer = self.completed.get(timeout=self.timeout_seconds + 5)
        self.in_flight -= 1
        _result(answer, nbytes, self.timeout_seconds)
        return when, nbytes
