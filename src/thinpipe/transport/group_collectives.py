"""c10d collectives for process groups that only implement send and recv, through the last rank as root.

Meant for the small, rare collectives that torch calls while it sets up a group. The reductions of every step use
`collectives.StarCollectives`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.transport.pending_work import finished_work

_GATHER_TAG, _BROADCAST_TAG = 4, 5
"""Message tags; distinct from those of `collectives` and of pipeline messages."""

_REDUCTIONS: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda stacked: stacked.sum(0)),
    (dist.ReduceOp.AVG, lambda stacked: stacked.sum(0) / len(stacked)),
    (dist.ReduceOp.MAX, lambda stacked: stacked.amax(0)),
    (dist.ReduceOp.MIN, lambda stacked: stacked.amin(0)),
)


class GroupCollectives(dist.ProcessGroup):
    """Mixin: adds blocking collectives to a group with `send` and `recv`. All processes must take part in each call."""

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        self._broadcast_from(tensor, opts.rootRank)
        return finished_work()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        reduce = next((reduce for kind, reduce in _REDUCTIONS if opts.reduceOp == kind), None)
        if reduce is None:
            raise NotImplementedError("a reduction other than sum, average, largest and least")
        stacked = self._gather_to_root(tensor)
        if stacked is not None:
            tensor.copy_(reduce(torch.stack(stacked)))
        self._broadcast_from(tensor, self.size() - 1)
        return finished_work()

    def allgather(  # type: ignore[override]
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        (tensor,), (targets,) = inputs, outputs
        found = self._gather_to_root(tensor)
        joined = torch.stack(found) if found is not None else tensor.new_empty((self.size(), *tensor.shape))
        self._broadcast_from(joined, self.size() - 1)
        for target, part in zip(targets, joined, strict=True):
            target.copy_(part)
        return finished_work()

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        token = torch.zeros(1, dtype=torch.uint8)
        self._gather_to_root(token)
        self._broadcast_from(token, self.size() - 1)
        return finished_work()

    def _gather_to_root(self, tensor: Tensor) -> list[Tensor] | None:
        """In the last rank the tensors of all processes, in rank order; None in the other ranks."""
        here, root = tensor.detach().cpu().contiguous(), self.size() - 1
        if self.rank() != root:
            self.send([here], root, _GATHER_TAG).wait(timedelta(0))
            return None
        parts = [torch.empty_like(here) for _ in range(root)]
        for work in [self.recv([part], rank, _GATHER_TAG) for rank, part in enumerate(parts)]:
            work.wait(timedelta(0))
        return [*parts, here]

    def _broadcast_from(self, tensor: Tensor, source: int) -> None:
        here = tensor.detach().cpu().contiguous()
        if self.rank() != source:
            self.recv([here], source, _BROADCAST_TAG).wait(timedelta(0))
            tensor.copy_(here)
            return
        others = [rank for rank in range(self.size()) if rank != source]
        for work in [self.send([here], rank, _BROADCAST_TAG) for rank in others]:
            work.wait(timedelta(0))
