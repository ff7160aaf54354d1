"""Runner interface (gradients and loss of a batch, from the segments of this process) and the single-process runner.

In every runner, gradients are summed over micro-batches in order and divided once: results are bit-identical.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.stage_module import StageModule


@dataclass(frozen=True)
class Received:
    """Traffic received over one boundary in one direction in one step."""

    boundary: int
    forward: bool
    """True for states, False for gradients."""
    nbytes: int
    waited_seconds: float
    """Seconds in which the training thread waited for these messages."""


class Runner(Protocol):
    """Computes with the segments of this process.

    `microbatches` are token ids, needed in the process with the first segment (empty elsewhere). The mean loss is
    returned in the process with the last segment, None elsewhere.
    """

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float | None:
        """Forward and backward; leaves the mean gradient over micro-batches in `grad`, which must be cleared before."""
        ...

    def loss(self, microbatches: Sequence[Tensor]) -> float | None:
        """Forward only, for validation."""
        ...

    def received(self) -> list[Received]:
        """Traffic of the last step, per boundary and direction, received from other processes."""
        ...

    @property
    def seconds(self) -> float:
        """Seconds that the last `gradients` call took, waiting included."""
        ...


class TwinRunner:
    """The twin: runs all segments in this process. Reference for every pipeline placement."""

    def __init__(self, stage_module: StageModule) -> None:
        self.stage_module = stage_module
        self.seconds = 0.0

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float:
        started = time.monotonic()
        loss = self._run(step, microbatches, backward=True)
        divide_gradients([self.stage_module], len(microbatches))
        self.seconds = time.monotonic() - started
        return loss

    @torch.no_grad()
    def loss(self, microbatches: Sequence[Tensor]) -> float:
        return self._run(0, microbatches, backward=False)

    def _run(self, step: int, microbatches: Sequence[Tensor], *, backward: bool) -> float:
        losses: list[Tensor] = []
        for index, ids_BW in enumerate(microbatches):
            self.stage_module.begin(ids_BW, step=step, microbatch=index, backward_follows=backward)
            loss = self.stage_module()
            if backward:
                loss.backward()
            losses.append(loss.detach())
        return mean_of(losses)

    def received(self) -> list[Received]:
        return []


def mean_of(losses: Sequence[Tensor]) -> float:
    """Mean of the losses of a step's micro-batches, summed in order, in float64 on the CPU. One synchronisation."""
    total = 0.0
    for loss in torch.stack(tuple(losses)).tolist():
        total += loss
    return total / len(losses)


def divide_gradients(stage_modules: Sequence[StageModule], microbatches: int) -> None:
    """Divides the gradients in `grad` by the number of micro-batches that they are sums of. None there: whoever sums
    them elsewhere (`optim.gradient_sums`) divides."""
    gradients = [p.grad for stage_module in stage_modules for p in stage_module.parameters() if p.grad is not None]
    if microbatches > 1 and gradients:
        torch._foreach_div_(gradients, float(microbatches))
