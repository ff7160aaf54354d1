"""Runs a process's share of the segments: alone (the twin) or as stages of a pipeline. Gives gradients and a loss.

Gradients are summed over micro-batches in order and divided once, whoever runs them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod
from thinpipe.pipeline.schedules import SCHEDULES
from thinpipe.pipeline.stage import MessageStage
from thinpipe.pipeline.twin import run_forward, run_microbatch
from thinpipe.pipeline.work import SegmentWork


class Runner(Protocol):
    """`microbatches` of ids reach the first segment; the mean loss comes out where the last one is, else None."""

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float | None: ...

    def loss(self, microbatches: Sequence[Tensor]) -> float | None:
        """Forward only."""
        ...


class TwinRunner:
    """All segments here."""

    def __init__(self, works: Sequence[SegmentWork], method: BoundaryMethod, *, seed: int) -> None:
        self.works, self.method, self.seed = works, method, seed

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0].device)
        for index, ids_BW in enumerate(microbatches):
            total += run_microbatch(self.works, self.method, ids_BW, seed=self.seed, step=step, microbatch=index)
        divide_gradients(self.works, len(microbatches))
        return (total / len(microbatches)).item()

    @torch.no_grad()
    def loss(self, microbatches: Sequence[Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0].device)
        for index, ids_BW in enumerate(microbatches):
            total += run_forward(self.works, self.method, ids_BW, seed=self.seed, step=0, microbatch=index)[0][-1]
        return (total / len(microbatches)).item()


class PipelineRunner:
    """These segments here, the others in the other processes of the group."""

    def __init__(
        self,
        works: Sequence[SegmentWork],
        count: int,
        method: BoundaryMethod,
        *,
        schedule: str,
        microbatches: int,
        seed: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.works = works
        self.stages = [MessageStage(work, count, method, seed=seed, device=device, group=group) for work in works]
        for stage in self.stages:
            stage.previous_here = next((s for s in self.stages if s.stage_index == stage.stage_index - 1), None)
        kind = SCHEDULES[schedule]
        stages = self.stages[0] if kind.segments_per_process == 1 else self.stages
        self.schedule = kind.make(stages, microbatches, loss_fn=lambda loss, _nothing: loss, scale_grads=False)
        self.nothing = torch.zeros(microbatches)

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float | None:
        for stage in self.stages:
            stage.step = step
        loss = self._run(self.schedule.step, microbatches)
        divide_gradients(self.works, len(microbatches))
        return loss

    @torch.no_grad()
    def loss(self, microbatches: Sequence[Tensor]) -> float | None:
        for stage in self.stages:
            stage.step = 0
        return self._run(self.schedule.eval, microbatches)

    def _run(self, step: Callable[..., Any], microbatches: Sequence[Tensor]) -> float | None:
        losses: list[Tensor] = []
        first, last = any(stage.is_first for stage in self.stages), any(stage.is_last for stage in self.stages)
        step(
            *((torch.cat(list(microbatches)),) if first else ()),
            **({"target": self.nothing, "losses": losses} if last else {}),
            return_outputs=False,
        )
        if not last:
            return None
        total = torch.zeros((), dtype=torch.float64)
        for loss in losses:
            total += loss.detach().cpu()
        return (total / len(losses)).item()


def divide_gradients(works: Sequence[SegmentWork], microbatches: int) -> None:
    gradients = [p.grad for work in works for p in work.parameters() if p.grad is not None]
    if microbatches > 1:
        torch._foreach_div_(gradients, float(microbatches))
