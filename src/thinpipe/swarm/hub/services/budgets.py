"""What one peer may ask of each service of the hub: how often, how many bytes, how much at once, and what comes first.

Every budget is several times what an honest peer needs, for the reason beside it. Pure: no I/O, no clock.
"""

import enum
import math
from dataclasses import dataclass, replace

from thinpipe.swarm.protocol.file_messages import MAX_CHUNK_NBYTES, READ_SERVICE, WRITE_SERVICE
from thinpipe.swarm.protocol.names import JOIN
from thinpipe.swarm.protocol.probe import MAX_PROBE_NBYTES, PIECE_NBYTES
from thinpipe.swarm.protocol.probe import SERVICE as PROBE
from thinpipe.swarm.protocol.reduction import SERVICE as REDUCE
from thinpipe.transport.nats.store_messages import SERVICE as STORE


class Priority(enum.IntEnum):
    """Order in which waiting requests are handled."""

    URGENT = 0
    """A step of all peers waits for it, or a deadline."""
    ORDINARY = 1
    BULK = 2
    """Megabytes: files and probes."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What one peer may ask of one service. Requests beyond the rates wait, up to `max_unanswered` and
    `max_held_nbytes`; further ones are dropped."""

    priority: Priority = Priority.ORDINARY
    per_second: float
    """Requests per second, in the long run."""
    nbytes_per_second: float
    """Bytes per second of requests and replies together, in the long run."""
    burst_seconds: float = 10.0
    """Seconds of unused budget that are saved up."""
    max_nbytes: int
    """Maximum size of one request, in bytes."""
    max_unanswered: int
    """Maximum number of requests that wait or are being handled."""
    max_at_once: int
    """Maximum number of requests that are being handled."""
    max_pending_nbytes: int = 80 << 20
    """Maximum size of the requests that the server holds for the hub, in bytes."""
    refused_per_second: float = 5.0
    """Refused requests per second, in the long run; further ones count as dropped. An honest peer has none, but for
    those that were in flight when a generation ended: 32 chunks of a file that the hub does not expect any more."""

    @property
    def max_pending(self) -> int:
        """Maximum number of requests that the server holds for the hub: it drops what a flooder sends beyond it, before
        it would cut the hub off for what waits."""
        return max(8, min(self.max_unanswered, self.max_pending_nbytes // max(1, self.max_nbytes)))

    @property
    def max_held_nbytes(self) -> int:
        """Maximum size of all requests that wait or are being handled, in bytes: that of four at most, or of many small
        ones."""
        return max(4 * self.max_nbytes, min(self.max_unanswered * self.max_nbytes, _MAX_HELD_NBYTES))

    @property
    def of_refused(self) -> "Budget":
        return replace(
            self, per_second=self.refused_per_second, nbytes_per_second=math.inf, burst_seconds=_REFUSED_BURST_SECONDS
        )


_REFUSED_BURST_SECONDS = 20.0
_MAX_HELD_NBYTES = 20 << 20
"""Bytes that a peer may have waiting at one service: the 16 MB that the bandwidth probe keeps in flight, and some
more."""
_GIGABIT = 125e6
"""Bytes per second of a link of 1 Gbit/s, faster than the homes' links that runs are made for."""


def _question(*, max_nbytes: int = 64 << 10, max_at_once: int = 32) -> Budget:
    """A question that an honest peer repeats a few times a second at most. The burst is for starts, when every file and
    every layer is asked for, and for what has piled up while the hub was suspended."""
    return Budget(
        per_second=20,
        nbytes_per_second=20 * (64 << 10),
        burst_seconds=20,
        max_nbytes=max_nbytes,
        max_unanswered=32,
        max_at_once=max_at_once,
    )


BUDGETS: dict[str, Budget] = {
    # Two a second from the peer's program, two from its `thinpipe status`. A link that was cut for two minutes delivers
    # all of them at once.
    "heartbeat": Budget(
        priority=Priority.URGENT,
        per_second=10,
        nbytes_per_second=10 << 10,
        burst_seconds=30,
        max_nbytes=1 << 10,
        max_unanswered=300,
        max_at_once=300,
    ),
    # One or two a step, one after the other: not above 500 a second over loopback. A number for each gradient and a few
    # for each peer: 131,000 numbers are enough for 8,000 layers.
    REDUCE: Budget(
        priority=Priority.URGENT,
        per_second=1000,
        nbytes_per_second=32e6,
        max_nbytes=1 << 20,
        max_unanswered=8,
        max_at_once=8,
    ),
    "next": _question(),
    "ready": _question(),
    "leave": _question(max_nbytes=1 << 10),
    "status": _question(max_nbytes=1 << 10),
    "admin": _question(max_nbytes=1 << 10),
    "renew": _question(max_nbytes=1 << 10),
    # Takes a thread while names or signatures are looked at: one peer must not take all threads.
    "reach": _question(max_nbytes=1 << 10, max_at_once=1),
    # A manifest names every file of a checkpoint, with about 150 bytes each.
    "checkpoint": _question(max_nbytes=2 << 20, max_at_once=1),
    # Three batches ahead in each of two splits, a batch a step; replies of megabytes.
    "tokens": Budget(
        per_second=500, nbytes_per_second=_GIGABIT, max_nbytes=1 << 10, max_unanswered=32, max_at_once=4
    ),
    # A few events a step, nothing waits for them, and none may be lost.
    "event": Budget(
        per_second=1000, nbytes_per_second=8e6, max_nbytes=64 << 10, max_unanswered=10_000, max_at_once=10_000
    ),
    # Rendezvous: a dozen keys for each peer of the generation; waits are long, and a thread's each.
    STORE: Budget(
        per_second=200, nbytes_per_second=4e6, max_nbytes=128 << 10, max_unanswered=64, max_at_once=64
    ),
    READ_SERVICE: Budget(
        priority=Priority.BULK,
        per_second=2000,
        nbytes_per_second=_GIGABIT,
        max_nbytes=4 << 10,
        max_unanswered=64,
        max_at_once=8,
    ),
    WRITE_SERVICE: Budget(
        priority=Priority.BULK,
        per_second=2000,
        nbytes_per_second=_GIGABIT,
        max_nbytes=MAX_CHUNK_NBYTES + (8 << 10),
        max_unanswered=64,
        max_at_once=8,
    ),
    # 16 MB in flight in pieces of 256 KiB, see `swarm.peer.bandwidth_probe`.
    PROBE: Budget(
        priority=Priority.BULK,
        per_second=20_000,
        nbytes_per_second=2 * _GIGABIT,
        max_nbytes=MAX_PROBE_NBYTES + (4 << 10),
        max_unanswered=128,
        max_at_once=16,
    ),
    # Of the holder of an invite: questions, and the probe of `thinpipe doctor`.
    JOIN: Budget(
        priority=Priority.BULK,
        per_second=500,
        nbytes_per_second=_GIGABIT,
        max_nbytes=PIECE_NBYTES + (4 << 10),
        max_unanswered=256,
        max_at_once=16,
    ),
}  # fmt: skip


class Bucket:
    """Token bucket of a budget. A request costs the time in which the budget would allow it: 1 / `per_second` and its
    bytes / `nbytes_per_second`. Up to `burst_seconds` of unused time are saved, and a cost is paid afterwards, when the
    size of the reply is known."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._paid_until = float("-inf")
        """Time up to which the requests so far have used the budget."""

    def charge(self, now: float, *, requests: int = 0, nbytes: int = 0) -> None:
        cost = requests / self._budget.per_second + nbytes / self._budget.nbytes_per_second
        self._paid_until = max(self._paid_until, now - self._budget.burst_seconds) + cost

    def wait_seconds(self, now: float) -> float:
        """Seconds until the next request may be handled; 0: now."""
        return max(0.0, self._paid_until - now)
