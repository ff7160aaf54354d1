"""Messages between two stages, in the order of their micro-batches, through any process group.

Receives are posted before they are needed and sends leave at once, so that a round trip is paid once and not for every
micro-batch: gloo's sender waits until the receiver is ready.
"""

import time
from collections import deque
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.transport.labels import Label, is_labelled
from thinpipe.transport.staging import host_buffer, to_host
from thinpipe.transport.threads import Watcher

AHEAD_NBYTES = 16 << 20
"""Posted ahead per direction: more than a line of 1 Gbit/s has under way in 100 ms. At least two messages."""

_FIRST_TAG = 16


def mail_tag(boundary: int, *, forward: bool) -> int:
    """Every boundary and direction has its own, so that no order between them has to be kept."""
    return _FIRST_TAG + 2 * boundary + (0 if forward else 1)


def tell(group: dist.ProcessGroup, tag: int, label: Label, microbatch: int) -> None:
    """Groups that send labels along compare them."""
    if is_labelled(group):
        group.label(tag, replace(label, microbatch=microbatch))


class Incoming:
    """What one neighbour sends in one direction."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, *, name: str, device: torch.device) -> None:
        """`device` is where messages will go on to."""
        self.group, self.peer, self.tag, self.name, self.device = group, peer, tag, name, device
        self.nbytes = self.ahead = 0
        self.received_nbytes, self.waited_seconds = 0, 0.0
        self._posted: deque[tuple[Tensor, dist.Work]] = deque()
        self._unposted = self._taken = 0
        self._label = Label()

    def expect(self, messages: int, nbytes: int, label: Label) -> None:
        """So many of this length will come in this step; validation may have another than training."""
        assert not len(self._posted) + self._unposted, "messages of the last step were left"
        self.nbytes, self.ahead = nbytes, max(2, AHEAD_NBYTES // nbytes)
        self._unposted, self._taken, self._label = messages, 0, label
        self.received_nbytes, self.waited_seconds = 0, 0.0
        self._post()

    def _post(self) -> None:
        while self._unposted and len(self._posted) < self.ahead:
            buffer = host_buffer(self.nbytes, self.device)
            tell(self.group, self.tag, self._label, self._taken + len(self._posted))
            self._posted.append((buffer, self.group.recv([buffer], self.peer, self.tag)))
            self._unposted -= 1

    def take(self, microbatch: int) -> Tensor:
        """The message of the next micro-batch, when it has come."""
        assert microbatch == self._taken, f"micro-batch {microbatch} of {self.name} taken out of order"
        message, work = self._posted.popleft()
        started = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise ConnectionError(f"waited for micro-batch {microbatch} of {self.name}, and lost it: {error}") from None
        self.waited_seconds += time.monotonic() - started
        self.received_nbytes += message.numel()
        self._taken += 1
        self._post()
        return message


class Outgoing:
    """What goes to one neighbour in one direction. A watcher lets go of each message when it has left."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, *, name: str) -> None:
        self.group, self.peer, self.tag, self.name = group, peer, tag, name
        self._watcher = Watcher(f"sends {name}")
        self._problems: list[Exception] = []

    def send(self, message: Tensor, label: Label, microbatch: int) -> None:
        if self._problems:
            raise ConnectionError(f"could not send {self.name}: {self._problems[0]}")
        message = to_host(message)
        tell(self.group, self.tag, label, microbatch)
        work = self.group.send([message], self.peer, self.tag)
        self._watcher.watch(work, partial(_left, message, self._problems))


def _left(_message: Tensor, problems: list[Exception], error: Exception | None) -> None:
    """The message was needed until now."""
    if error is not None:
        problems.append(error)
