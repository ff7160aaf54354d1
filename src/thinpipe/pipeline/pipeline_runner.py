"""Runner for the pipeline stages of this process; the other stages are in other processes.

Separate from `runner` because importing torch's pipelining takes over a second, and only a pipeline needs it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from thinpipe.pipeline.label_link import LabelLink
from thinpipe.pipeline.message_stage import MessageStage
from thinpipe.pipeline.placement import SCHEDULE_LAYOUTS, Placement
from thinpipe.pipeline.runner import Received, divide_gradients, mean_of
from thinpipe.pipeline.stage import EarlyForwards1F1B
from thinpipe.pipeline.stage_module import StageModule


class PipelineRunner:
    """Computes gradients and loss with the stages of this process, driven by a torch pipeline schedule."""

    def __init__(
        self,
        stage_modules: Sequence[StageModule],
        placement: Placement,
        group: dist.ProcessGroup,
        *,
        schedule: str,
        extra: int,
        microbatches: int,
        device: torch.device,
    ) -> None:
        self.stage_modules, self.microbatches, self.seconds = stage_modules, microbatches, 0.0
        indices, count = placement.processes[group.rank()], len(placement.stages)
        self.labels = LabelLink(stage_modules[0].methods[0].shape, placement, group, device)
        self.stages = [
            MessageStage(stage_module, index, count, device=device, group=group, labels=self.labels)
            for stage_module, index in zip(stage_modules, indices, strict=True)
        ]
        layout = SCHEDULE_LAYOUTS[schedule]
        self.schedule = SCHEDULES[schedule](
            self.stages[0] if layout.stages_per_process == 1 else self.stages,
            microbatches,
            loss_fn=lambda loss, _nothing: loss,
            scale_grads=False,
            **({"extra": extra} if layout.allows_extra_microbatches else {}),
        )
        for stage in self.stages:
            stage.connect()
        self.dummy_targets = torch.zeros(microbatches)

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float | None:
        started = time.monotonic()
        loss = self._run(self.schedule.step, step, microbatches, backward=True)
        divide_gradients(self.stage_modules, self.microbatches)
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
        self.labels.begin(self.microbatches, self.stages[0].label)
        losses: list[Tensor] = []
        first, last = any(stage.is_first for stage in self.stages), any(stage.is_last for stage in self.stages)
        run(
            *((torch.cat(list(microbatches)),) if first else ()),
            **({"target": self.dummy_targets, "losses": losses} if last else {}),
            return_outputs=False,
        )
        if not last:
            return None
        return mean_of(losses)

    def received(self) -> list[Received]:
        """Traffic of the last step, per boundary and direction, received from other processes. Labels of the last stage
        count as a part of its states."""
        both = [
            (boundary, forward, receiver)
            for stage in self.stages
            for boundary, forward, receiver in (
                (stage.before, True, stage.states_in),
                (stage.after, False, stage.gradients_in),
            )
        ]
        received = [
            Received(boundary, forward, receiver.received_nbytes, receiver.waited_seconds)
            for boundary, forward, receiver in both
            if receiver is not None
        ]
        if (labels := self.labels.receiver) is not None:
            last = max((part for part in received if part.forward), key=lambda part: part.boundary)
            nbytes, waited = last.nbytes + labels.received_nbytes, last.waited_seconds + labels.waited_seconds
            received[received.index(last)] = replace(last, nbytes=nbytes, waited_seconds=waited)
        return received


SCHEDULES: dict[str, Callable[..., Any]] = {
    "GPipe": ScheduleGPipe,
    "1F1B": EarlyForwards1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
}
