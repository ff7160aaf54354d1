"""c10d process group over a NATS server: sends are pushed, receives match in the order in which they were posted.

A sequence gap, a wrong length or label, a lost peer or a lost connection fails all transfers at once, with the name of
the peer: no transfer waits for a message that cannot arrive.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.transport.collectives import GroupCollectives
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.activity import ActivityTracker
from thinpipe.transport.nats.broadcasts import GENERATION_OVER, LOST, GenerationOver, PeerLost
from thinpipe.transport.nats.connection import HubConnection
from thinpipe.transport.nats.flow_control import FlowControl, OutgoingFrame
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.streams import WINDOW_NBYTES
from thinpipe.transport.pending_work import TimedWork

PIECES, CREDITS = "data", "credit"
"""Message kinds, the last part of the NATS subjects."""


class _PeerWork(TimedWork):
    """Work that reports to the activity tracker for which peer the training thread waits."""

    def __init__(self, what: str, *, timeout: timedelta, peer: str, activity: ActivityTracker) -> None:
        super().__init__(what, timeout=timeout)
        self._peer, self._activity = peer, activity

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._activity.waiting(self._peer, self.is_completed):
            return super().wait(timeout)


class NatsGroup(GroupCollectives):
    """Process group of one generation. `names`: peers in rank order; `incarnations`: incarnation numbers, default 0.

    Members must pass `world.barrier` before they send: messages to a peer that has not subscribed yet are lost.
    Thread-safe; incoming frames are handled in the connection thread.
    """

    def __init__(
        self,
        connection: HubConnection,
        names: Sequence[str],
        origin: Origin,
        *,
        timeout: timedelta,
        incarnations: Mapping[str, int] | None = None,
        window: int = WINDOW_NBYTES,
    ) -> None:
        super().__init__(names.index(connection.address.name), len(names))  # type: ignore[call-arg]
        self._names, self._timeout = list(names), timeout
        incarnation_of = dict.fromkeys(names, 0) | dict(incarnations or {})
        self._flow_control = FlowControl(origin, incarnation_of, window=window)
        self._works: set[TimedWork] = set()
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self.connection, self._generation = connection, origin.generation
        connection.on_failure(self._fail)
        others = [name for name in names if name != connection.address.name]
        self._subscriptions = [
            connection.subscribe(PIECES, self._arrived, senders=others),
            connection.subscribe(CREDITS, self._arrived, senders=others, urgent=True),
            connection.subscribe_broadcast(LOST, self._peer_lost),
            connection.subscribe_broadcast(GENERATION_OVER, self._generation_over),
        ]

    def label(self, tag: int, label: Label) -> None:
        with self._lock:
            self._flow_control.label(tag, label)

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Starts a send. The work completes when the last piece is written; do not modify the tensor until then."""
        data, to = bytes_of(tensors), self._names[dst]
        work = self._work(f"sending {len(data)} bytes to {to} (process {dst}, tag {tag})", to)
        self.connection.activity.record_action()
        self._begin(work, lambda done: self._flow_control.send(to, tag, data, done))
        return work

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Posts a receive. The work completes when the message is complete; do not use the tensor until then."""
        buffer, sender = bytes_of(tensors), self._names[src]
        what = f"receiving {len(buffer)} bytes from {sender} (process {src}, tag {tag})"
        work = self._work(what, sender)
        self._begin(work, lambda done: self._flow_control.expect(sender, tag, buffer, done))
        return work

    def close(self) -> None:
        """Ends the subscriptions and fails pending transfers. The connection stays open, e.g. for another group."""
        for cancel in self._subscriptions:
            cancel()
        self._subscriptions = []
        self._fail(ConnectionError("the process group is closed"))

    shutdown = abort = close

    def getBackendName(self) -> str:  # noqa: N802
        return "nats"

    def name(self) -> str:
        return "nats"

    @property
    def held_nbytes(self) -> int:
        with self._lock:
            return self._flow_control.held_nbytes

    def _work(self, what: str, peer: str) -> "_PeerWork":
        return _PeerWork(what, timeout=self._timeout, peer=peer, activity=self.connection.activity)

    def _begin(self, work: TimedWork, action: Callable[[Callable[[], None]], Iterator[OutgoingFrame]]) -> None:
        with self._lock:
            self._works.add(work)
            if self._failure is None:
                self._dispatch(lambda: action(partial(self._done, work)))
            if self._failure is not None:
                work.fail(self._failure)

    def _arrived(self, sender: str, data: bytes) -> None:
        with self._lock:
            if self._failure is None:
                self._dispatch(lambda: self._flow_control.arrived(sender, data))

    def _dispatch(self, action: Callable[[], Iterator[OutgoingFrame]]) -> None:
        try:
            for outgoing in action():
                kind = CREDITS if outgoing.is_credit else PIECES
                self.connection.send(outgoing.to, kind, outgoing.frame, outgoing.done, urgent=outgoing.is_credit)
        except ProtocolError as error:
            self._fail(error)

    def _done(self, work: TimedWork) -> None:
        work.complete(time.monotonic())
        with self._lock:
            self._works.discard(work)

    def _peer_lost(self, data: bytes) -> None:
        name = decode_foreign(data, PeerLost).peer
        if name in self._names:
            self._fail(ConnectionError(f"{name} is lost"))

    def _generation_over(self, data: bytes) -> None:
        over = decode_foreign(data, GenerationOver)
        if over.generation == self._generation:
            self._fail(ConnectionError(over.reason))

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
            works, self._works = self._works, set()
        for work in works:
            work.fail(self._failure)


def bytes_of(tensors: Sequence[Tensor]) -> memoryview:
    """Byte view of the single tensor of a message. Raises ValueError unless it is a contiguous CPU tensor."""
    (tensor,) = tensors
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a message is a contiguous CPU tensor, not {tensor.device} with strides {tensor.stride()}")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
