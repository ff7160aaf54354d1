"""Links as queues, for `simulate`: the model of `transport/emulation/link.py`, for unequal links and an optional hub.

A message waits for the sender's uplink, travels for the latency, and passes the receiver's downlink while it arrives.
The hub has one queue for all incoming and one for all outgoing messages, and forwards whole pieces (store and forward).
Not modelled: jitter, packet loss, acknowledgements, and flow control that a slow receiver would exert.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from thinpipe.transport.emulation.framing import framed_nbytes, wire_nbytes
from thinpipe.transport.emulation.link import transmission
from thinpipe.transport.nats.frame import HEADER_NBYTES
from thinpipe.transport.nats.streams import PIECE_NBYTES

Framing = Literal["gloo", "nats", "none"]


@dataclass(frozen=True, kw_only=True)
class LinkSpec:
    """Internet link of a process or of the hub."""

    up_bps: float = math.inf
    """Uplink rate in bits/s, shared by all messages sent."""
    down_bps: float = math.inf
    """Downlink rate in bits/s, shared by all messages received."""
    latency_s: float = 0.0
    """One-way latency. Without a hub, that of the sender applies; with a hub, that of the process plus the hub's."""
    duplex: Literal["full", "shared"] = "full"
    """Half duplex if "shared": one queue for both directions."""
    latency_per: Literal["pipelined", "message"] = "pipelined"
    """With "message" the link stays occupied during the latency of each message."""


def nbytes_on_wire(payload_nbytes: int, framing: Framing) -> int:
    """Bytes of a message including protocol overhead."""
    if framing == "none":
        return payload_nbytes
    if framing == "gloo":
        return wire_nbytes(payload_nbytes)
    return framed_nbytes(payload_nbytes + pieces_of(payload_nbytes) * HEADER_NBYTES)


def pieces_of(payload_nbytes: int) -> int:
    """Number of pieces in which the NATS transport sends a message."""
    return max(1, -(-payload_nbytes // PIECE_NBYTES))


class Queue:
    """FIFO queue of a link direction: `free` is when it is next idle; `busy` seconds and `nbytes` are totals."""

    __slots__ = ("busy", "free", "name", "nbytes")

    def __init__(self, name: str) -> None:
        self.name, self.free, self.busy, self.nbytes = name, 0.0, 0.0, 0


class Hop(NamedTuple):
    """One queue on the route of a message of known size."""

    queue: Queue
    nbytes: int
    seconds: float
    """Transmission time of the whole message at the queue's rate."""
    latency: float = 0.0
    """Seconds from here to the next hop."""
    occupied: float = 0.0
    """Seconds for which the queue stays blocked after the message."""
    stored_share: float = 0.0
    """Share of the message that must have arrived before forwarding starts: 0 is cut-through, 1 store-and-forward."""

    def transmit(self, began: float, arrived: float) -> tuple[float, float]:
        """Queues a message whose bytes came in from `began` to `arrived`; returns start and end of its transmission."""
        queue = self.queue
        first, last = arrived - (arrived - began) * (1 - self.stored_share), arrived + self.seconds * self.stored_share
        start, finish = transmission(queue.free, first, last, self.seconds)
        queue.free = finish + self.occupied
        queue.busy += self.seconds + self.occupied
        queue.nbytes += self.nbytes
        return start, finish


class Network:
    """Queues of all links, and the routes between processes."""

    def __init__(self, links: Sequence[LinkSpec], hub: LinkSpec | None, framing: Framing) -> None:
        self.hub, self.framing = hub, framing
        self._ends = [(link, *_queues(link, str(process))) for process, link in enumerate(links)]
        self._hub_ends = None if hub is None else (hub, *_queues(hub, "hub"))
        self._routes: dict[tuple[int | None, int | None, int], list[Hop]] = {}

    def route(self, source: int | None, target: int | None, payload_nbytes: int) -> list[Hop]:
        """Hops from `source` to `target`, by process index; None is the hub itself. Cached: hops share their queues."""
        key = (source, target, payload_nbytes)
        if key not in self._routes:
            ends_of_hops = (
                [(source, target)] if self.hub is None or None in (source, target) else [(source, None), (None, target)]
            )
            self._routes[key] = [hop for ends in ends_of_hops for hop in self._hops_between(*ends, payload_nbytes)]
        return self._routes[key]

    def _hops_between(self, source: int | None, target: int | None, payload_nbytes: int) -> list[Hop]:
        (sender, up, _), (receiver, _, down) = self._end(source), self._end(target)
        nbytes = nbytes_on_wire(payload_nbytes, self.framing)
        late = sender.latency_s if self.hub is None else sender.latency_s + receiver.latency_s
        occupied = late if sender.latency_per == "message" else 0.0
        stored_share = 1 / pieces_of(payload_nbytes) if source is None else 0.0
        return [
            Hop(up, nbytes, nbytes * 8 / sender.up_bps, late, occupied, stored_share),
            Hop(down, nbytes, nbytes * 8 / receiver.down_bps),
        ]

    def _end(self, process: int | None) -> tuple[LinkSpec, Queue, Queue]:
        if process is not None:
            return self._ends[process]
        assert self._hub_ends is not None
        return self._hub_ends

    @property
    def queues(self) -> list[Queue]:
        ends = [*self._ends, *([self._hub_ends] if self._hub_ends is not None else [])]
        return list(dict.fromkeys(queue for _, *queues in ends for queue in queues))


def _queues(link: LinkSpec, name: str) -> tuple[Queue, Queue]:
    if link.duplex == "shared":
        both = Queue("hub" if name == "hub" else f"link {name}")
        return both, both
    return (Queue("hub up"), Queue("hub down")) if name == "hub" else (Queue(f"up {name}"), Queue(f"down {name}"))
