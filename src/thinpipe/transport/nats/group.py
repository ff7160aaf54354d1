"""A process group over a NATS server: sends are pushed, receives are matched in the order in which they were posted.

A gap, a wrong length or label, a lost peer or connection fails every transfer at once, with the name of the peer:
nothing ever waits for mail that cannot come.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.transport.collectives import Collectives
from thinpipe.transport.labels import Label
from thinpipe.transport.nats.channel import WINDOW_NBYTES
from thinpipe.transport.nats.frame import Origin, ProtocolError
from thinpipe.transport.nats.mailroom import Letter, Mailroom
from thinpipe.transport.nats.post import Post
from thinpipe.transport.nats.progress import Progress
from thinpipe.transport.works import TimedWork

PIECES, CREDITS = "d", "c"


class _PeersWork(TimedWork):
    """Who waits for it waits for a peer, and says so."""

    def __init__(self, what: str, *, timeout: timedelta, peer: str, progress: Progress) -> None:
        super().__init__(what, timeout=timeout)
        self._peer, self._progress = peer, progress

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._progress.waiting(self._peer, self.is_completed):
            return super().wait(timeout)


class NatsGroup(Collectives):
    """`names` are the peers in the order of their ranks. Members must `meet` before they send."""

    def __init__(
        self,
        post: Post,
        names: Sequence[str],
        origin: Origin,
        *,
        timeout: timedelta,
        incarnations: Mapping[str, int] | None = None,
        window: int = WINDOW_NBYTES,
    ) -> None:
        super().__init__(names.index(post.address.name), len(names))  # type: ignore[call-arg]
        self._names, self._timeout = list(names), timeout
        lives = dict.fromkeys(names, 0) | dict(incarnations or {})
        self._mailroom = Mailroom(origin, lives, window=window)
        self._works: set[TimedWork] = set()
        self._problem: Exception | None = None
        self._turn = threading.RLock()
        self.post, self._epoch = post, origin.epoch
        post.on_failure(self._fail)
        self._subscriptions = [
            post.receive(PIECES, self._arrived),
            post.receive(CREDITS, self._arrived, urgent=True),
            post.listen("lost", self._peer_lost),
            post.listen("over", self._epoch_over),
        ]

    def label(self, tag: int, label: Label) -> None:
        with self._turn:
            self._mailroom.label(tag, label)

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """The work is done when the last piece has left; until then, hands off the tensor."""
        data, to = bytes_of(tensors), self._names[dst]
        work = self._work(f"sending {len(data)} bytes to {to} (process {dst}, tag {tag})", to)
        self.post.progress.mark()
        self._begin(work, lambda done: self._mailroom.send(to, tag, data, done))
        return work

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """The work is done when the message is whole; until then, hands off the tensor."""
        buffer, sender = bytes_of(tensors), self._names[src]
        what = f"receiving {len(buffer)} bytes from {sender} (process {src}, tag {tag})"
        work = self._work(what, sender)
        self._begin(work, lambda done: self._mailroom.expect(sender, tag, buffer, done))
        return work

    def close(self) -> None:
        """The post stays open, for another group perhaps."""
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
        with self._turn:
            return self._mailroom.held_nbytes

    def _work(self, what: str, peer: str) -> "_PeersWork":
        return _PeersWork(what, timeout=self._timeout, peer=peer, progress=self.post.progress)

    def _begin(self, work: TimedWork, action: Callable[[Callable[[], None]], Iterator[Letter]]) -> None:
        with self._turn:
            self._works.add(work)
            if self._problem is None:
                self._dispatch(lambda: action(partial(self._done, work)))
            if self._problem is not None:
                work.fail(self._problem)

    def _arrived(self, sender: str, data: bytes) -> None:
        with self._turn:
            if self._problem is None:
                self._dispatch(lambda: self._mailroom.arrived(sender, data))

    def _dispatch(self, action: Callable[[], Iterator[Letter]]) -> None:
        try:
            for letter in action():
                kind = CREDITS if letter.is_credit else PIECES
                self.post.send(letter.to, kind, letter.frame, letter.done, urgent=letter.is_credit)
        except ProtocolError as error:
            self._fail(error)

    def _done(self, work: TimedWork) -> None:
        work.settle(time.monotonic())
        with self._turn:
            self._works.discard(work)

    def _peer_lost(self, data: bytes) -> None:
        name = data.decode(errors="replace")
        if name in self._names:
            self._fail(ConnectionError(f"peer {name} (process {self._names.index(name)}) is lost"))

    def _epoch_over(self, data: bytes) -> None:
        epoch, _, why = data.decode(errors="replace").partition(" ")
        if epoch == str(self._epoch):
            self._fail(ConnectionError(why))

    def _fail(self, error: Exception) -> None:
        with self._turn:
            if self._problem is None:
                self._problem = error
            works, self._works = self._works, set()
        for work in works:
            work.fail(self._problem)


def bytes_of(tensors: Sequence[Tensor]) -> memoryview:
    """The one tensor of a message, seen as bytes."""
    (tensor,) = tensors
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a message is a contiguous CPU tensor, not {tensor.device} with strides {tensor.stride()}")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
