"""A process group with a home line in front of it: messages take the time that they would take on the internet.

It wraps any c10d group that can send and receive. Messages are handed to it late and reported late: after the sender's
uplink and the latency at one end, after the receiver's downlink at the other. Eight bytes behind each say when it was
due, so that a busy processor that wakes a thread too late does not make the line slower. It models a transport that
pushes; gloo by itself first waits until the receive is posted, so post receives ahead. Point to point only, between CPU
tensors: what travels is bytes, and a GPU's are copied before they are sent.
"""

import atexit
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.core.seeds import derive_seed
from thinpipe.transport.line import Line
from thinpipe.transport.settings import LinkSection
from thinpipe.transport.threads import Timer, Watcher
from thinpipe.transport.works import TimedWork

_INTERRUPT_TAG = 0x7E11
"""Of a receive that nobody answers: see `_interrupt`."""
_STAMP_NBYTES = 8
"""Behind each message: the moment when it is due, a float64. Not counted: a real message has none."""
_LINGER_S = 2.0
"""How long a closing group waits for receivers to take what has arrived at their end."""
_FOR_EVER = timedelta(days=365)
"""How long an inner work is waited for. Limits are for the outer work: gloo ends a whole group when one has passed."""
_WAKE_S = 0.1
"""An idle thread ends well within this time when it is told to."""


class InnerGroup(Protocol):
    """What is asked of a c10d group or backend."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work: ...


class ShapedGroup(dist.ProcessGroup):
    """The `inner` group as processes on lines like `link` would see it.

    Each (peer, tag) has a thread that waits for its receives, so tags should be few. `close` it, or destroy it through
    torch.distributed, so that what has left still arrives; the end of the interpreter does so too.
    """

    def __init__(self, inner: InnerGroup, link: LinkSection, *, timeout: timedelta, seed: int = 0) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner, self._timeout = inner, timeout
        self._line = Line(link, seed=derive_seed(seed, inner.rank()))
        self._grace_s = link.latency_s + link.jitter_s
        self._timer = Timer()
        self._watchers: dict[tuple[str, int, int], Watcher] = {}
        self._lost: dict[int, Exception] = {}
        self._clock_offsets: dict[int, float] = {}
        self._closed = False
        self._lock = threading.Lock()
        atexit.register(self.close)

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Takes a copy, as a socket does. The work is done when the last byte has left; it arrives after that."""
        payload = _bytes_of(tensors)
        nbytes = payload.numel()
        message = torch.empty(nbytes + _STAMP_NBYTES, dtype=torch.uint8)
        message[:nbytes] = payload
        work = TimedWork(f"sending {nbytes} bytes to peer {dst} (tag {tag})", timeout=self._timeout)
        with self._lock:
            self._refuse_when_closed()
            if dst in self._lost:
                work.fail(self._lost[dst])
                return work
            journey = self._line.send(nbytes, dst, time.monotonic())
            message[nbytes:] = torch.tensor([journey.arrives], dtype=torch.float64).view(torch.uint8)
            work.settle(journey.departs)
            self._timer.at(journey.arrives, partial(self._deliver, message, dst, tag, work))
        return work

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Posted at once. The work is done when the message is through the downlink; until then, hands off it."""
        payload = _bytes_of(tensors)
        nbytes = payload.numel()
        message = torch.empty(nbytes + _STAMP_NBYTES, dtype=torch.uint8)
        work = TimedWork(f"receiving {nbytes} bytes from peer {src} (tag {tag})", timeout=self._timeout)
        with self._lock:
            self._refuse_when_closed()
            inner_work = self._inner.recv([message], src, tag)
            self._watcher("receive", src, tag).watch(inner_work, partial(self._received, message, payload, src, work))
        return work

    def close(self) -> None:
        """Lets what has left its line arrive, drops the rest, and ends the threads; waiting works fail."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._timer.close(until=time.monotonic() + self._grace_s)
        for watcher in self._watchers.values():
            watcher.close()
        taken_by = time.monotonic() + _LINGER_S
        senders = [watcher for (kind, _, _), watcher in self._watchers.items() if kind == "send"]
        ended = all(watcher.join(taken_by - time.monotonic()) for watcher in senders)
        if not (ended and self._joined(_WAKE_S)):
            self._interrupt()
            self._joined(_LINGER_S)  # one that wakes while the interpreter ends aborts the process

    def shutdown(self) -> None:
        self.close()

    def abort(self) -> None:
        self.close()

    def getBackendName(self) -> str:  # noqa: N802
        return "shaped"

    def name(self) -> str:
        return "shaped"

    def _deliver(self, message: Tensor, dst: int, tag: int, work: TimedWork) -> None:
        try:
            inner_work = self._inner.send([message], dst, tag)
        except Exception as error:
            self._sent(dst, work, error)
        else:
            self._watcher("send", dst, tag).watch(inner_work, partial(self._sent, dst, work))

    def _sent(self, dst: int, work: TimedWork, error: Exception | None) -> None:
        if error is not None:
            self._lost.setdefault(dst, error)
            work.fail(error)

    def _received(self, message: Tensor, payload: Tensor, src: int, work: TimedWork, error: Exception | None) -> None:
        if error is None:
            payload.copy_(message[: payload.numel()])
            due = message[payload.numel() :].clone().view(torch.float64).item()
            work.settle(self._line.receive(payload.numel(), self._arrival(src, due, time.monotonic())))
        else:
            self._lost.setdefault(src, error)
            work.fail(error)

    def _arrival(self, src: int, due: float, seen: float) -> float:
        """When a message came, whenever it was seen. The least delay so far is the difference of the two clocks."""
        with self._lock:
            offset = self._clock_offsets[src] = min(seen - due, self._clock_offsets.get(src, seen - due))
        return due + offset

    def _watcher(self, kind: str, peer: int, tag: int) -> Watcher:
        key = (kind, peer, tag)
        if key not in self._watchers:
            self._watchers[key] = Watcher(f"{kind}-{peer}-{tag}", timeout=_FOR_EVER)
        return self._watchers[key]

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this process group is closed")

    def _joined(self, seconds: float) -> bool:
        return all(watcher.join(seconds) for watcher in self._watchers.values())

    def _interrupt(self) -> None:
        """Wakes every thread that waits in the inner group: gloo's only way is a timeout, which ends the group."""
        for peer in range(self.size()):
            if peer != self.rank():
                try:
                    self._inner.recv([torch.empty(1)], peer, _INTERRUPT_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue

    def _no_collective(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError("a shaped group sends and receives only: build collectives from send and recv")

    allgather = allgather_coalesced = allreduce = allreduce_coalesced = alltoall = alltoall_base = _no_collective
    barrier = broadcast = gather = reduce = reduce_scatter = scatter = recv_anysource = _no_collective
    _allgather_base = _reduce_scatter_base = _no_collective


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    """The one tensor of a message, seen as bytes."""
    (tensor,) = tensors
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a message is a contiguous CPU tensor, not {tensor.device} with strides {tensor.stride()}")
    return tensor.detach().reshape(-1).view(torch.uint8)
