"""Timing model of a home link: departure and arrival times of messages. No clock, thread or network is involved.

All outgoing messages share one FIFO queue for the uplink, then take the latency; all incoming messages share the
downlink. Sender and receiver are assumed to have links with the same settings.
"""

import random
import threading
from typing import NamedTuple

from thinpipe.config.link import LinkConfig
from thinpipe.core.seeds import derive_seed
from thinpipe.transport.emulation.framing import wire_nbytes


def transmission(free: float, first: float, last: float, seconds: float) -> tuple[float, float]:
    """Start and end of a message's transmission through a FIFO queue that is idle from time `free` on.

    The first byte reaches the queue at time `first`, the last byte at time `last`; the whole message takes `seconds` at
    the queue's rate. Bytes pass while others still arrive, and the end is not before `last`.
    """
    start = max(first, free)
    return start, max(last, start + seconds)


class Transit(NamedTuple):
    """Departure and arrival time of a message, in seconds on the clock of the `now` passed to `send`."""

    departs: float
    """Time when the last byte has left the uplink of the sender."""
    arrives: float
    """Time when the last byte reaches the downlink of the receiver."""


class EmulatedLink:
    """Emulated link of one process. Thread-safe."""

    def __init__(self, link: LinkConfig, *, seed: int) -> None:
        self._up_bps, self._down_bps = link.up_bps, link.down_bps
        self._latency_s, self._jitter_s = link.latency_s, link.jitter_s
        self._random = random.Random(derive_seed(seed, "jitter"))
        self._up_free = self._down_free = 0.0
        self._last_arrival: dict[int, float] = {}
        self._lock = threading.Lock()

    def send(self, payload_nbytes: int, peer: int, now: float) -> Transit:
        """Enqueues a message on the uplink. As with TCP, messages to one peer arrive in order."""
        seconds = wire_nbytes(payload_nbytes) * 8 / self._up_bps
        with self._lock:
            _, departs = transmission(self._up_free, now, now, seconds)
            self._up_free = departs
            arrives = departs + self._latency_s + self._random.uniform(0, self._jitter_s)
            arrives = self._last_arrival[peer] = max(arrives, self._last_arrival.get(peer, arrives))
        return Transit(departs, arrives)

    def receive(self, payload_nbytes: int, arrived: float) -> float:
        """Time when a message whose last byte arrived at `arrived` has passed the downlink.

        Bytes pass the downlink while the message arrives: an idle downlink as fast as the uplink adds no delay.
        """
        wire_bits = wire_nbytes(payload_nbytes) * 8
        began = arrived - wire_bits / self._up_bps
        with self._lock:
            _, finish = transmission(self._down_free, began, arrived, wire_bits / self._down_bps)
            self._down_free = finish
        return finish
