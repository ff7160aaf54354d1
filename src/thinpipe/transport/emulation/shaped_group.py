"""Process group with an emulated home link: messages take the time that they would take on the internet.

Wraps any c10d group with send and recv. A message is passed to the inner group after the delay of the sender's uplink
and the latency; the receive completes after the delay of the receiver's downlink. An 8-byte trailer carries the due
time, so threads that wake late on a busy CPU do not make the link slower. The model is a transport that pushes; gloo
first waits until the receive is posted, so post receives ahead. Point-to-point only, and CPU tensors only: callers copy
GPU tensors to the host.
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

from thinpipe.config.link import LinkConfig
from thinpipe.core.seeds import derive_seed
from thinpipe.transport.emulation.link import EmulatedLink
from thinpipe.transport.pending_work import TimedWork
from thinpipe.transport.threads import Timer, Watcher

_INTERRUPT_TAG = 0x7E11
"""Tag of a receive without a matching send: see `_interrupt`."""
_TIMESTAMP_NBYTES = 8
"""Size of the trailer of each message: its due time, a float64. Not counted as traffic of the emulated link."""
_LINGER_S = 2.0
"""Seconds that a closing group waits for receivers to take delivered messages."""
_NO_TIMEOUT = timedelta(days=365)
"""Timeout of inner works, effectively none. Timeouts apply to outer works: in gloo, a timeout ends the whole group."""
_WAKE_S = 0.1
"""Seconds, more than enough for an idle thread to exit after `close`."""


class InnerGroup(Protocol):
    """Required interface of the wrapped c10d group or backend."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work: ...


class ShapedGroup(dist.ProcessGroup):
    """The `inner` group behind emulated links with the settings `link`.

    There is one receive thread per (peer, tag), so tags should be few. `close` the group, or destroy it through
    torch.distributed, so that messages in flight are delivered; interpreter exit closes it too.
    """

    def __init__(self, inner: InnerGroup, link: LinkConfig, *, timeout: timedelta, seed: int = 0) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner, self._timeout = inner, timeout
        self._link = EmulatedLink(link, seed=derive_seed(seed, inner.rank()))
        self._grace_s = link.latency_s + link.jitter_s
        self._timer = Timer()
        self._watchers: dict[tuple[str, int, int], Watcher] = {}
        self._lost: dict[int, Exception] = {}
        self._clock_offsets: dict[int, float] = {}
        self._closed = False
        self._lock = threading.Lock()
        atexit.register(self.close)

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Sends a copy of the tensor. The work completes when the last byte has left the uplink, before it arrives."""
        payload = _bytes_of(tensors)
        nbytes = payload.numel()
        message = torch.empty(nbytes + _TIMESTAMP_NBYTES, dtype=torch.uint8)
        message[:nbytes] = payload
        work = TimedWork(f"sending {nbytes} bytes to peer {dst} (tag {tag})", timeout=self._timeout)
        with self._lock:
            self._refuse_when_closed()
            if dst in self._lost:
                work.fail(self._lost[dst])
                return work
            transit = self._link.send(nbytes, dst, time.monotonic())
            message[nbytes:] = torch.tensor([transit.arrives], dtype=torch.float64).view(torch.uint8)
            work.complete(transit.departs)
            self._timer.at(transit.arrives, partial(self._deliver, message, dst, tag, work))
        return work

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Posts a receive at once. The work completes when the message has passed the downlink; do not use the tensor
        until then."""
        payload = _bytes_of(tensors)
        nbytes = payload.numel()
        message = torch.empty(nbytes + _TIMESTAMP_NBYTES, dtype=torch.uint8)
        work = TimedWork(f"receiving {nbytes} bytes from peer {src} (tag {tag})", timeout=self._timeout)
        with self._lock:
            self._refuse_when_closed()
            inner_work = self._inner.recv([message], src, tag)
            self._watcher("receive", src, tag).watch(inner_work, partial(self._received, message, payload, src, work))
        return work

    def close(self) -> None:
        """Delivers messages due within latency plus jitter, drops the rest and ends the threads; pending works fail."""
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
            self._joined(_LINGER_S)  # a thread that wakes during interpreter exit aborts the process

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
            work.complete(self._link.receive(payload.numel(), self._arrival(src, due, time.monotonic())))
        else:
            self._lost.setdefault(src, error)
            work.fail(error)

    def _arrival(self, src: int, due: float, seen: float) -> float:
        """Arrival time of a message on the local clock, independent of when the receive thread woke up.

        The smallest delay seen so far estimates the offset between the clocks of the two processes.
        """
        with self._lock:
            offset = self._clock_offsets[src] = min(seen - due, self._clock_offsets.get(src, seen - due))
        return due + offset

    def _watcher(self, kind: str, peer: int, tag: int) -> Watcher:
        key = (kind, peer, tag)
        if key not in self._watchers:
            self._watchers[key] = Watcher(f"{kind}-{peer}-{tag}", timeout=_NO_TIMEOUT)
        return self._watchers[key]

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this process group is closed")

    def _joined(self, seconds: float) -> bool:
        return all(watcher.join(seconds) for watcher in self._watchers.values())

    def _interrupt(self) -> None:
        """Wakes all threads that wait in the inner group. gloo offers only a timeout for this, which ends the group."""
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
    """Byte view of the single tensor of a message. Raises ValueError unless it is a contiguous CPU tensor."""
    (tensor,) = tensors
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"a message is a contiguous CPU tensor, not {tensor.device} with strides {tensor.stride()}")
    return tensor.detach().reshape(-1).view(torch.uint8)
