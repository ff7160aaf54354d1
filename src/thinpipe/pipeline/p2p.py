"""Point-to-point messages between two stages over any process group, in micro-batch order.

Receives are posted ahead and sends do not block, so the round-trip time is paid once and not per micro-batch: a gloo
send waits until the matching receive is posted.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.device.host_copies import CopyToHost, has_pinned_memory, host_buffer, to_device
from thinpipe.transport.labels import Label, is_labelled
from thinpipe.transport.threads import Watcher

_LOG = logging.getLogger(__name__)
PREPOSTED_NBYTES = 16 << 20
"""Bytes of receives posted ahead per boundary and direction, but at least two messages. More than the bandwidth-delay
product of a 1 Gbit/s link with 100 ms."""

_FIRST_TAG = 16
LABELS_TAG = 15
"""Tag of the labels from the first stage to the last (`pipeline/label_link.py`)."""


def p2p_tag(boundary: int, *, forward: bool) -> int:
    """Message tag, unique per boundary and direction, so that different boundaries need no common order."""
    return _FIRST_TAG + 2 * boundary + (0 if forward else 1)


def attach_label(group: dist.ProcessGroup, tag: int, label: Label, microbatch: int) -> None:
    """Sets the label of the next send or receive on `tag`, if the group transmits and checks labels."""
    if is_labelled(group):
        group.label(tag, replace(label, microbatch=microbatch))


class P2PReceiver:
    """Receives the messages of one boundary and direction from a neighbouring stage. Used by the training thread."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, *, name: str, device: torch.device) -> None:
        """`device`: device on which the caller gets the messages."""
        self.group, self.peer, self.tag, self.name, self.device = group, peer, tag, name, device
        self.nbytes = self.preposted = 0
        self.received_nbytes, self.waited_seconds = 0, 0.0
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()
        self._unposted = self._received_count = 0
        self._label = Label()

    def expect(self, messages: int, nbytes: int, label: Label) -> None:
        """Prepares for at least `messages` messages of `nbytes` each in this step; their size may differ in validation.

        That number of receives is posted ahead; `receive` posts those of further messages.
        """
        assert not len(self._posted) + self._unposted, "messages of the previous step were not received"
        self.nbytes, self.preposted = nbytes, max(2, PREPOSTED_NBYTES // nbytes)
        self._unposted, self._received_count, self._label = messages, 0, label
        self.received_nbytes, self.waited_seconds = 0, 0.0
        self._post()

    def _post(self) -> None:
        while self._unposted and len(self._posted) < self.preposted:
            buffer = host_buffer(self.nbytes, self.device)
            attach_label(self.group, self.tag, self._label, self._received_count + len(self._posted))
            self._posted.append((buffer, self.group.recv([buffer], self.peer, self.tag)))
            self._unposted -= 1

    def receive(self, microbatch: int) -> Tensor:
        """Waits for the message of the next micro-batch, and returns it on the device. Raises ConnectionError if it
        cannot be received."""
        assert microbatch == self._received_count, f"micro-batch {microbatch} of {self.name} taken out of order"
        if not self._posted:
            self._unposted += 1
            self._post()
        message, work = self._posted.popleft()
        started = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(f"could not receive micro-batch {microbatch} of {self.name}: {error}") from None
        self.waited_seconds += time.monotonic() - started
        self.received_nbytes += message.numel()
        self._received_count += 1
        self._post()
        return to_device(message, self.device)


class P2PSender:
    """Sends the messages of one boundary and direction to a neighbouring stage.

    Messages that have to be copied from the device first are sent by a thread that waits for the copies in order; the
    training thread does not wait. A failed copy or send is raised as ConnectionError by the next `send` or
    `begin_step`.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, *, name: str, device: torch.device) -> None:
        """`device`: device of the messages."""
        self.name = name
        self._sends = _Sends(group, peer, tag, name)
        self._copies = Watcher(f"copies {name}") if has_pinned_memory(device) else None
        self._count = self._count_before_step = 0

    def begin_step(self) -> None:
        """Waits until all messages that were sent before the previous `begin_step` have left: a slow receiver lets the
        messages of at most two steps queue up."""
        self._sends.wait_for(self._count_before_step)
        self._count_before_step = self._count
        self._raise_failure()

    def send(self, message: Tensor, label: Label, microbatch: int) -> None:
        self._raise_failure()
        if self._copies is None:
            self._sends.start(message.cpu(), label, microbatch)
        else:
            copy = CopyToHost(message)
            self._copies.watch(copy, partial(self._sends.start_copied, copy.host, label, microbatch))
        self._count += 1

    def _raise_failure(self) -> None:
        if self._sends.errors:
            raise ConnectionError(f"could not send {self.name}: {self._sends.errors[0]}")


class _Sends:
    """Sends on one tag, and the number of completed ones, failed ones included. A watcher thread holds each message
    until its send has completed. Shared by a sender and its threads, which must hold no reference to the sender."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, name: str) -> None:
        self.errors: list[Exception] = []
        self._group, self._peer, self._tag = group, peer, tag
        self._watcher = Watcher(f"sends {name}")
        self._count, self._changed = 0, threading.Condition()

    def start(self, message: Tensor, label: Label, microbatch: int) -> None:
        attach_label(self._group, self._tag, label, microbatch)
        work = self._group.send([message], self._peer, self._tag)
        self._watcher.watch(work, partial(self._completed, message))

    def start_copied(self, message: Tensor, label: Label, microbatch: int, error: Exception | None) -> None:
        """Callback of the thread that waits for copies. After a failure no message is sent: the receiver would take it
        for the missing one."""
        if error is None and not self.errors:
            try:
                self.start(message, label, microbatch)
            except Exception as raised:
                error = raised
            else:
                return
        self._completed(message, error)

    def wait_for(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._count >= count)

    def _completed(self, _message: Tensor, error: Exception | None) -> None:
        """Callback of the watcher thread; its `_message` argument keeps the tensor alive until the send has
        completed."""
        if error is not None:
            _LOG.debug("a send failed; the next send reports it", exc_info=error)
            self.errors.append(error)
        with self._changed:
            self._count += 1
            self._changed.notify_all()
