"""Runs some stages of a pipeline whose other stages are in other processes. Gives gradients and a loss.

Apart from the twin because torch's pipelining takes over a second to import, and only a pipeline needs it.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.pipeline.chain import Chain
from thinpipe.pipeline.placement import LAYOUTS, Placement
from thinpipe.pipeline.runner import Received, divide_gradients
from thinpipe.pipeline.schedules import SCHEDULES
from thinpipe.pipeline.stage import MessageStage


class PipelineRunner:
    """These stages here, the others in the other processes of the group."""

    def __init__(
        self,
        chains: Sequence[Chain],
        placement: Placement,
        group: dist.ProcessGroup,
        *,
        schedule: str,
        extra: int,
        microbatches: int,
        device: torch.device,
    ) -> None:
        self.chains, self.microbatches, self.seconds = chains, microbatches, 0.0
        indices, count = placement.processes[group.rank()], len(placement.stages)
        self.stages = [
            MessageStage(chain, index, count, device=device, group=group)
            for chain, index in zip(chains, indices, strict=True)
        ]
        for stage in self.stages:
            stage.previous_here = next((s for s in self.stages if s.stage_index == stage.stage_index - 1), None)
        layout = LAYOUTS[schedule]
        self.schedule = SCHEDULES[schedule](
            self.stages[0] if layout.stages_per_process == 1 else self.stages,
            microbatches,
            loss_fn=lambda loss, _nothing: loss,
            scale_grads=False,
            **({"extra": extra} if layout.takes_extra else {}),
        )
        for stage in self.stages:
            stage.connect()
        self.nothing = torch.zeros(microbatches)

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float | None:
        started = time.monotonic()
        loss = self._run(self.schedule.step, step, microbatches, backward=True)
        divide_gradients(self.chains, self.microbatches)
        self.seconds = time.monotonic() - started
        return loss

    @torch.no_grad()
    def loss(self, microbatches: Sequence[Tensor]) -> float | None:
        return self._run(self.schedule.eval, 0, microbatches, backward=False)

    def _run(
        self, run: Callable[..., Any], step: int, microbatches: Sequence[Tensor], *, backward: bool
    ) -> float | None:
        for stage in self.stages:
            stage.begin(step, self.microbatches, backward=backward)
        losses: list[Tensor] = []
        first, last = any(stage.is_first for stage in self.stages), any(stage.is_last for stage in self.stages)
        run(
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

    def received(self) -> list[Received]:
        """Of the messages that came from other processes."""
        both = [
            (boundary, forward, incoming)
            for stage in self.stages
            for boundary, forward, incoming in (
                (stage.before, True, stage.states_in),
                (stage.after, False, stage.gradients_in),
            )
        ]
        return [
            Received(boundary, forward, incoming.received_nbytes, incoming.waited_seconds)
            for boundary, forward, incoming in both
            if incoming is not None
        ]
