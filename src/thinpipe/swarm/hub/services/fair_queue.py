"""Requests that wait to be handled by the hub: urgent ones first, peers in turn, every peer within its budgets.

Pure: no I/O; `now` is in seconds of a monotonic clock.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from thinpipe.swarm.hub.services.budgets import Bucket, Budget, Priority

MAX_HELD_NBYTES = 128 << 20
"""Bytes of all requests that wait or are being handled, beyond which a peer must not have more than its share. What N
flooders hold together is below 1 + log(N) times this."""
MAX_BULK_AT_ONCE = 16
"""Requests with priority `BULK` that are handled at once, over all peers."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a peer to a service. `reply`: subject of the reply, or empty."""

    peer: str
    service: str
    data: bytes
    reply: str


@dataclass(eq=False, slots=True)
class _Line:
    """Requests of one peer to one service."""

    budget: Budget
    bucket: Bucket
    waiting: deque[Request] = field(default_factory=deque)
    running: int = 0
    held_nbytes: int = 0

    def may_start(self, now: float) -> bool:
        return self.running < self.budget.max_at_once and not self.bucket.wait_seconds(now)


class FairQueue:
    """Waiting and running requests of all peers."""

    def __init__(self, budgets: Mapping[str, Budget]) -> None:
        self._budgets = budgets
        self._lines: dict[tuple[str, str], _Line] = {}
        self._queues: dict[Priority, deque[_Line]] = {priority: deque() for priority in Priority}
        """Lines in which somebody waits, in the order of their turns."""
        self._bulk_running = 0
        self.held_nbytes = 0
        """Bytes of all requests that wait or are being handled."""

    def arrive(self, request: Request) -> str:
        """Queues a request, or drops it and returns why."""
        line = self._line(request)
        nbytes, budget = len(request.data), line.budget
        if nbytes > budget.max_nbytes:
            return f"{nbytes} bytes, and at most {max(0, budget.max_nbytes)} are accepted"
        if len(line.waiting) + line.running >= budget.max_unanswered:
            return f"{budget.max_unanswered} requests before it are not answered yet"
        held = line.held_nbytes + nbytes
        if held > budget.max_held_nbytes or (self.held_nbytes + nbytes > MAX_HELD_NBYTES and held > self._share()):
            return f"{line.held_nbytes} bytes before it are not answered yet"
        if not line.waiting:
            self._queues[budget.priority].append(line)
        line.waiting.append(request)
        line.held_nbytes += nbytes
        self.held_nbytes += nbytes
        return ""

    def start(self, now: float) -> Request | None:
        """The request to handle next; None: none may be handled now. Call `done` when it is answered."""
        for priority, queue in self._queues.items():
            if priority == Priority.BULK and self._bulk_running >= MAX_BULK_AT_ONCE:
                return None
            for _ in range(len(queue)):
                line = queue.popleft()
                found = self._take(line, now) if line.may_start(now) else None
                if line.waiting:
                    queue.append(line)
                if found is not None:
                    return found
        return None

    def _take(self, line: _Line, now: float) -> Request:
        request = line.waiting.popleft()
        line.running += 1
        self._bulk_running += line.budget.priority == Priority.BULK
        line.bucket.charge(now, requests=1, nbytes=len(request.data))
        return request

    def done(self, request: Request, reply_nbytes: int, now: float) -> None:
        """A started request was answered with this many bytes."""
        line = self._line(request)
        line.running -= 1
        self._bulk_running -= line.budget.priority == Priority.BULK
        line.held_nbytes -= len(request.data)
        self.held_nbytes -= len(request.data)
        line.bucket.charge(now, nbytes=reply_nbytes)

    def wait_seconds(self, now: float) -> float | None:
        """Seconds until the budget of a waiting request allows it; None: none waits for its budget alone."""
        lines = (line for queue in self._queues.values() for line in queue if line.running < line.budget.max_at_once)
        return min(filter(None, (line.bucket.wait_seconds(now) for line in lines)), default=None)

    def forget(self, peer: str) -> None:
        """Drops what a peer has waiting that does not belong to the run any more."""
        for key, line in list(self._lines.items()):
            if key[0] == peer:
                nbytes = sum(len(request.data) for request in line.waiting)
                line.held_nbytes -= nbytes
                self.held_nbytes -= nbytes
                line.waiting.clear()
                if line in (queue := self._queues[line.budget.priority]):
                    queue.remove(line)
                if not line.running:
                    del self._lines[key]

    def _line(self, request: Request) -> _Line:
        key = request.peer, request.service
        line = self._lines.get(key)
        if line is None:
            budget = self._budgets[request.service]
            line = self._lines[key] = _Line(budget, Bucket(budget))
        return line

    def _share(self) -> float:
        """Bytes that each peer with requests may hold while the hub holds its maximum."""
        return MAX_HELD_NBYTES / max(1, len({key[0] for key, line in self._lines.items() if line.held_nbytes}))
