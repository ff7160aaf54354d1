"""When messages leave and arrive on a home line. Arithmetic on times only: no clock, no thread, no network.

Everything sent waits in one queue for the uplink, then travels for the latency; everything received shares the
downlink. A receiver is taken to have the same kind of line as its senders.
"""

import random
import threading
from typing import NamedTuple

from thinpipe.core.seeds import derive_seed
from thinpipe.transport.framing import wire_nbytes
from thinpipe.transport.settings import LinkSection


class Journey(NamedTuple):
    """Times on the clock that `send` was given."""

    departs: float
    """The last byte has left the sender."""
    arrives: float
    """It is at the receiver's end."""


class Line:
    """The line of one process. Callers may be in several threads."""

    def __init__(self, link: LinkSection, *, seed: int) -> None:
        self._up_bps, self._down_bps = link.up_bps, link.down_bps
        self._latency_s, self._jitter_s = link.latency_s, link.jitter_s
        self._random = random.Random(derive_seed(seed, "jitter"))
        self._up_free = self._down_free = 0.0
        self._last_arrival: dict[int, float] = {}
        self._lock = threading.Lock()

    def send(self, payload_nbytes: int, peer: int, now: float) -> Journey:
        """Puts a message at the end of the uplink's queue. A late message holds up those behind it, as TCP does."""
        seconds = wire_nbytes(payload_nbytes) * 8 / self._up_bps
        with self._lock:
            departs = self._up_free = max(now, self._up_free) + seconds
            arrives = departs + self._latency_s + self._random.uniform(0, self._jitter_s)
            arrives = self._last_arrival[peer] = max(arrives, self._last_arrival.get(peer, arrives))
        return Journey(departs, arrives)

    def receive(self, payload_nbytes: int, arrived: float) -> float:
        """When a message whose last byte came at `arrived` is through the downlink.

        It passes while it arrives: with an idle downlink as fast as the uplink, nothing is added.
        """
        wire_bits = wire_nbytes(payload_nbytes) * 8
        began = arrived - wire_bits / self._up_bps
        with self._lock:
            finish = self._down_free = max(arrived, max(began, self._down_free) + wire_bits / self._down_bps)
        return finish
