"""Small all-reduces through the hub: one round trip, instead of two for a star through a peer."""

import logging
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch.distributed as dist

from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.protocol.reduction import MAX_WAIT_SECONDS, SERVICE, ReduceOp, ReduceReply, ReduceRequest
from thinpipe.transport.collectives import StarCollectives
from thinpipe.transport.nats.connection import HubConnection

_LOG = logging.getLogger(__name__)


class HubCollectives(StarCollectives):
    """Collectives in which all-reduces of numbers go through the hub, which sends all peers the same result. Larger
    objects go from peer to peer, as in `StarCollectives`."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        connection: HubConnection,
        generation: int,
        *,
        timeout_seconds: float,
    ) -> None:
        super().__init__(group)
        self._connection, self._generation, self._timeout = connection, generation, timeout_seconds
        self._rounds = 0

    def all_reduce_step(self, numbers: Sequence[float]) -> list[float]:
        return self._all_reduce("step", numbers)

    def all_equal(self, numbers: Sequence[float]) -> list[bool]:
        """The hub refuses numbers that differ, and says whose."""
        self._all_reduce("equal", numbers)
        return [True] * len(numbers)

    def _all_reduce(self, op: ReduceOp, numbers: Sequence[float]) -> list[float]:
        """Repeats the request until it is answered: the hub answers a repeated request with the same result. Raises
        ConnectionError when the generation is over or the timeout has passed."""
        self._rounds += 1
        request = ReduceRequest(
            generation=self._generation, round_number=self._rounds, op=op, values=np.array(numbers, "<f8").tobytes()
        )
        data, deadline = msgspec.msgpack.encode(request), time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            try:
                answer = self._connection.request(SERVICE, data, seconds=MAX_WAIT_SECONDS + 10)
            except TimeoutError:
                _LOG.warning("all-reduce %d: no answer of the hub, repeating the request", self._rounds)
                continue
            reply = decode_foreign(answer, ReduceReply)
            if reply.refusal:
                raise ConnectionError(reply.refusal)
            if reply.values is not None:
                found: list[float] = np.frombuffer(reply.values, "<f8").tolist()
                if len(found) != len(numbers):
                    raise ProtocolError(f"the hub reduced {len(numbers)} numbers to {len(found)}")
                return found
        raise ConnectionError(f"not all peers took part in an all-reduce within {self._timeout:.0f} s")
