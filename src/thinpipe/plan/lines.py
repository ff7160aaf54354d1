"""Lines as queues, for `simulate`: the arithmetic of `transport/line.py`, for any two lines and with a hub between.

A message waits for the sender's uplink, travels for the latency, and passes the receiver's downlink while it arrives. A
hub has a queue for all that comes in and one for all that goes out, and passes on whole pieces. Not modelled: jitter,
loss, acknowledgements, and a receiver that takes its messages too late to be sent more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinpipe.transport.framing import framed_nbytes, wire_nbytes
from thinpipe.transport.nats.channel import PIECE_NBYTES
from thinpipe.transport.nats.frame import HEADER_NBYTES

Framing = Literal["gloo", "nats", "none"]


@dataclass(frozen=True, kw_only=True)
class LineSpec:
    """The line of a process, or of a hub."""

    up_bps: float = math.inf
    """All that is sent shares this rate."""
    down_bps: float = math.inf
    """All that is received shares this rate."""
    latency_s: float = 0.0
    """One way. Between two processes the sender's counts; to or from a hub, the process's and the hub's together."""
    duplex: Literal["full", "shared"] = "full"
    """shared: what is sent and what is received wait in one queue."""
    latency_per: Literal["pipelined", "message"] = "pipelined"
    """message: the line is occupied during the latency as well."""


def nbytes_on_wire(payload_nbytes: int, framing: Framing) -> int:
    if framing == "none":
        return payload_nbytes
    if framing == "gloo":
        return wire_nbytes(payload_nbytes)
    return framed_nbytes(payload_nbytes + pieces_of(payload_nbytes) * HEADER_NBYTES)


def pieces_of(payload_nbytes: int) -> int:
    """In which a message passes a hub."""
    return max(1, -(-payload_nbytes // PIECE_NBYTES))


class Queue:
    """First come, first served."""

    __slots__ = ("busy", "free", "name", "nbytes")

    def __init__(self, name: str) -> None:
        self.name, self.free, self.busy, self.nbytes = name, 0.0, 0.0, 0


class Hop(NamedTuple):
    """A queue that messages of one length pass on one of their ways."""

    queue: Queue
    nbytes: int
    seconds: float
    """In which it would pass if all of it were there."""
    latency: float = 0.0
    """After which it is at the next."""
    held: float = 0.0
    """How long nothing else may pass after it."""
    stored: float = 0.0
    """The share that must be here before it goes on: 0 passes while it comes, 1 when all has come."""

    def cross(self, began: float, arrived: float) -> tuple[float, float]:
        """When a message that came from `began` to `arrived` begins to pass, and when it is through."""
        queue = self.queue
        start = max(arrived - (arrived - began) * (1 - self.stored), queue.free)
        finish = max(arrived + self.seconds * self.stored, start + self.seconds)
        queue.free = finish + self.held
        queue.busy += self.seconds + self.held
        queue.nbytes += self.nbytes
        return start, finish


class Network:
    """The queues of all lines, and the way from one process to another."""

    def __init__(self, lines: Sequence[LineSpec], hub: LineSpec | None, framing: Framing) -> None:
        self.hub, self.framing = hub, framing
        self._ends = [(line, *_queues(line, str(process))) for process, line in enumerate(lines)]
        self._hub_ends = None if hub is None else (hub, *_queues(hub, "hub"))
        self._routes: dict[tuple[int | None, int | None, int], list[Hop]] = {}

    def route(self, source: int | None, target: int | None, payload_nbytes: int) -> list[Hop]:
        """None is the hub itself."""
        key = (source, target, payload_nbytes)
        if key not in self._routes:
            ways = (
                [(source, target)] if self.hub is None or None in (source, target) else [(source, None), (None, target)]
            )
            self._routes[key] = [hop for way in ways for hop in self._way(*way, payload_nbytes)]
        return self._routes[key]

    def _way(self, source: int | None, target: int | None, payload_nbytes: int) -> list[Hop]:
        (sender, up, _), (receiver, _, down) = self._end(source), self._end(target)
        nbytes = nbytes_on_wire(payload_nbytes, self.framing)
        late = sender.latency_s if self.hub is None else sender.latency_s + receiver.latency_s
        held = late if sender.latency_per == "message" else 0.0
        stored = 1 / pieces_of(payload_nbytes) if source is None else 0.0
        return [
            Hop(up, nbytes, nbytes * 8 / sender.up_bps, late, held, stored),
            Hop(down, nbytes, nbytes * 8 / receiver.down_bps),
        ]

    def _end(self, process: int | None) -> tuple[LineSpec, Queue, Queue]:
        if process is not None:
            return self._ends[process]
        assert self._hub_ends is not None
        return self._hub_ends

    @property
    def queues(self) -> list[Queue]:
        ends = [*self._ends, *([self._hub_ends] if self._hub_ends is not None else [])]
        return list(dict.fromkeys(queue for _, *queues in ends for queue in queues))


def _queues(line: LineSpec, name: str) -> tuple[Queue, Queue]:
    if line.duplex == "shared":
        both = Queue("hub" if name == "hub" else f"line {name}")
        return both, both
    return (Queue("hub up"), Queue("hub down")) if name == "hub" else (Queue(f"up {name}"), Queue(f"down {name}"))
