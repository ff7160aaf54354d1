"""Who is alive: heartbeat timeouts, and requests that a peer was sent and has not come back from.

Pure: events and the time are passed in. Peers that compute and stand still are found by `stalls`, closed connections by
`disconnects`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from thinpipe.swarm.protocol.messages import Answer, Measure, RestoreFiles, Standby

HEARTBEAT_TIMEOUT_SECONDS = 10.0
"""Seconds without a heartbeat after which a peer is lost."""


class Heartbeats:
    """Time of the last heartbeat of each peer. Pure: `now` is in seconds of a monotonic clock."""

    def __init__(self, timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._last: dict[str, float] = {}

    def on_heartbeat(self, name: str, now: float) -> None:
        self._last[name] = now

    def extend_deadlines(self, seconds: float) -> None:
        """Extends all deadlines by the seconds in which the hub did not process messages."""
        self._last = {name: last + seconds for name, last in self._last.items()}

    def newly_timed_out(self, now: float) -> Iterable[tuple[str, float]]:
        """Peers whose last heartbeat is too long ago, each with the seconds since then. Each is returned once, until it
        sends a heartbeat again."""
        lost = [(name, now - last) for name, last in self._last.items() if now - last > self._timeout_seconds]
        for name, _ in lost:
            del self._last[name]
        return lost


REQUEST_TIMEOUT_SECONDS = 300.0
"""Seconds that a peer may take before it asks again. Many times the duration of a measurement; for `RestoreFiles` it is
the time between two chunks, which includes reading a file from a slow disk."""
_DESCRIPTIONS: dict[type[Answer], str] = {
    Measure: "measure its machine",
    RestoreFiles: "upload files that the hub has lost",
    Standby: "wait",
}


@dataclass
class _PendingRequest:
    """What a peer was asked to do, and when it last made progress."""

    what: str
    since: float


@dataclass
class PendingRequests:
    """Peers that were asked to do something outside a generation and have not sent another request."""

    seconds: float = REQUEST_TIMEOUT_SECONDS
    """Seconds without progress after which a peer is overdue."""
    _pending: dict[str, _PendingRequest] = field(default_factory=dict)

    def add(self, name: str, answer: Answer, now: float) -> None:
        """Starts the deadline of an answer sent to a peer. Peers with an `Assignment` are covered by `StallDetector`
        instead."""
        self.discard(name)
        if type(answer) in _DESCRIPTIONS:
            self._pending[name] = _PendingRequest(_DESCRIPTIONS[type(answer)], now)

    def on_progress(self, name: str, now: float) -> None:
        """Restarts the deadline: a chunk of an upload has arrived."""
        if name in self._pending:
            self._pending[name].since = now

    def discard(self, name: str) -> None:
        """Ends the deadline: the peer has asked again or is gone."""
        self._pending.pop(name, None)

    def extend_deadlines(self, seconds: float) -> None:
        """Extends all deadlines by the seconds in which the hub did not process messages."""
        for request in self._pending.values():
            request.since += seconds

    def overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Names of overdue peers, each with a message for people."""
        for name, request in list(self._pending.items()):
            if now - request.since > self.seconds:
                asked = f"it was asked to {request.what} {now - request.since:.0f} s ago"
                yield name, f"it sends heartbeats, but {asked} and has not answered within {self.seconds:.0f} s"
