"""The twin of a pipeline of `CompressedStage`s: all stages in one process, with the same codecs between them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.boundary.codec import boundary_config, message_shape
from thinpipe.boundary.contract import MessageId
from thinpipe.boundary.registry import make_method
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.core.errors import UserError
from thinpipe.pipeline.in_process_boundary import cross_boundary


class CompressedSequential(nn.Module):
    """Modules in a row with a compressed boundary between every two, in one process.

    `step` has the losses and leaves the gradients that a pipeline of `CompressedStage`s of the same modules, `shape`,
    `boundary`, `dtype` and `seed` has: bit for bit on a CPU, in float32 or bfloat16, for modules without dropout (which
    draws from the random numbers of each process). So a boundary can be tried without a second process.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        shape: tuple[int, int, int],
        boundary: str | BoundaryConfig = "int4",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """Arguments as those of `CompressedStage`."""
        super().__init__()
        self.stages, self._seed = nn.ModuleList(stages), seed
        config, shape_and_dtype = boundary_config(boundary), message_shape(shape, dtype)
        self.methods = [
            make_method(config, shape_and_dtype, in_subspace=False, seed=seed) for _ in range(len(stages) - 1)
        ]
        self.step_number = -1
        """Number of the training step, from 0."""

    def forward(self, *args: Any) -> Any:
        """The output for one micro-batch, as `schedule.eval` has it: no codec state changes."""
        return self._run(args, microbatch=0, training=False)

    def step(
        self,
        *args: Tensor,
        target: Tensor,
        loss_fn: Callable[[Any, Tensor], Tensor],
        n_microbatches: int,
        scale_grads: bool = True,
    ) -> list[Tensor]:
        """Forward and backward passes of one step, as `schedule.step` of torch computes them; returns the loss of every
        micro-batch, detached.

        `scale_grads` as in torch's schedules: gradients are divided by the number of micro-batches. Raises UserError if
        the batch cannot be cut into equal micro-batches.
        """
        if any(len(argument) % n_microbatches for argument in (*args, target)):
            raise UserError(f"a batch of {len(target)} samples cannot be cut into {n_microbatches} equal micro-batches")
        self.step_number += 1
        losses = list[Tensor]()
        chunks = zip(*(argument.chunk(n_microbatches) for argument in (*args, target)), strict=True)
        for microbatch, (*inputs, wanted) in enumerate(chunks):
            loss = loss_fn(self._run(inputs, microbatch=microbatch, training=True), wanted)
            loss.backward()
            losses.append(loss.detach())
        if scale_grads and n_microbatches > 1:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(n_microbatches)
        return losses

    def _run(self, inputs: Sequence[Any], *, microbatch: int, training: bool) -> Any:
        first, *others = self.stages
        output = first(*inputs)
        for boundary, (stage, method) in enumerate(zip(others, self.methods, strict=True)):
            message_id = MessageId(
                seed=self._seed, step=self.step_number, microbatch=microbatch, boundary=boundary, training=training
            )
            output = stage(cross_boundary(output, None, method if training else method.at_inference, message_id))
        return output
