"""The small exchanges of a run through the hub: one round trip, where a star through a peer takes two."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch.distributed as dist

from thinpipe.swarm.ballot import Kind
from thinpipe.swarm.vote_service import MOST_WAIT_SECONDS, SERVICE, Decision, Vote
from thinpipe.transport.nats.post import Post
from thinpipe.transport.star import Star


class HubExchange(Star):
    """Numbers go to the hub, which answers everybody the same. Larger things go from peer to peer, as in any group."""

    def __init__(self, group: dist.ProcessGroup, post: Post, epoch: int, *, timeout_seconds: float) -> None:
        super().__init__(group)
        self._post, self._epoch, self._timeout = post, epoch, timeout_seconds
        self._rounds = 0

    def sum(self, numbers: Sequence[float]) -> list[float]:
        return self._vote("sum", numbers)

    def largest(self, numbers: Sequence[float]) -> list[float]:
        return self._vote("largest", numbers)

    def _vote(self, kind: Kind, numbers: Sequence[float]) -> list[float]:
        """Asks until it is answered: a lost answer is given again."""
        self._rounds += 1
        vote = Vote(epoch=self._epoch, number=self._rounds, kind=kind, numbers=np.array(numbers, "<f8").tobytes())
        data, deadline = msgspec.msgpack.encode(vote), time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            try:
                answer = self._post.request(SERVICE, data, seconds=MOST_WAIT_SECONDS + 10)
            except TimeoutError:
                continue
            decision = msgspec.msgpack.decode(answer, type=Decision)
            if decision.refusal:
                raise ConnectionError(decision.refusal)
            if decision.numbers is not None:
                found: list[float] = np.frombuffer(decision.numbers, "<f8").tolist()
                return found
        raise ConnectionError(f"the others have not voted within {self._timeout:.0f} s")
