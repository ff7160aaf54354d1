"""Collectives made of sends and receives, for groups that have nothing else. All through the last process.

Small and rare ones only: what torch asks of a group while it is set up. Every step's exchange is `star.Star`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.transport.works import finished_work

_UP, _DOWN = 4, 5
"""Tags of their own."""

_REDUCTIONS: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (dist.ReduceOp.SUM, lambda stacked: stacked.sum(0)),
    (dist.ReduceOp.AVG, lambda stacked: stacked.sum(0) / len(stacked)),
    (dist.ReduceOp.MAX, lambda stacked: stacked.amax(0)),
    (dist.ReduceOp.MIN, lambda stacked: stacked.amin(0)),
)


class Collectives(dist.ProcessGroup):
    """Gives a group with `send` and `recv` the rest. Calls end when everybody has taken part."""

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        self._spread(tensor, opts.rootRank)
        return finished_work()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:  # type: ignore[override]
        (tensor,) = tensors
        reduce = next((reduce for kind, reduce in _REDUCTIONS if opts.reduceOp == kind), None)
        if reduce is None:
            raise NotImplementedError("a reduction other than sum, average, largest and least")
        stacked = self._collect(tensor)
        if stacked is not None:
            tensor.copy_(reduce(torch.stack(stacked)))
        self._spread(tensor, self.size() - 1)
        return finished_work()

    def allgather(  # type: ignore[override]
        self,
        outputs: Sequence[Sequence[Tensor]],
        inputs: Sequence[Tensor],
        opts: Any = None,  # noqa: ARG002
    ) -> dist.Work:
        (tensor,), (targets,) = inputs, outputs
        found = self._collect(tensor)
        joined = torch.stack(found) if found is not None else tensor.new_empty((self.size(), *tensor.shape))
        self._spread(joined, self.size() - 1)
        for target, part in zip(targets, joined, strict=True):
            target.copy_(part)
        return finished_work()

    def barrier(self, opts: Any = None) -> dist.Work:  # noqa: ARG002
        token = torch.zeros(1, dtype=torch.uint8)
        self._collect(token)
        self._spread(token, self.size() - 1)
        return finished_work()

    def _collect(self, tensor: Tensor) -> list[Tensor] | None:
        """In the last process what every one has, in their order; None in the others."""
        here, centre = tensor.detach().cpu().contiguous(), self.size() - 1
        if self.rank() != centre:
            self.send([here], centre, _UP).wait(timedelta(0))
            return None
        parts = [torch.empty_like(here) for _ in range(centre)]
        for work in [self.recv([part], rank, _UP) for rank, part in enumerate(parts)]:
            work.wait(timedelta(0))
        return [*parts, here]

    def _spread(self, tensor: Tensor, source: int) -> None:
        here = tensor.detach().cpu().contiguous()
        if self.rank() != source:
            self.recv([here], source, _DOWN).wait(timedelta(0))
            tensor.copy_(here)
            return
        others = [rank for rank in range(self.size()) if rank != source]
        for work in [self.send([here], rank, _DOWN) for rank in others]:
            work.wait(timedelta(0))
