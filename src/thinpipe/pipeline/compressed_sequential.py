"""The twin of a pipeline of `CompressedStage`s: all stages in one process, with the same codecs between them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from thinpipe.config.boundary import BoundaryConfig
from thinpipe.core.errors import UserError
from thinpipe.pipeline.boundary_codecs import BoundaryCodecs
from thinpipe.pipeline.in_process_boundary import cross_boundary, single_tensor


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
        shape: Sequence[int],
        boundary: str | BoundaryConfig = "int4",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        """Arguments as those of `CompressedStage`."""
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self._codecs = BoundaryCodecs(
            range(len(stages)), len(stages), shape=shape, boundary=boundary, dtype=dtype, seed=seed
        )
        self.step_number = -1
        """Number of the training step, from 0; -1 before the first."""

    def codec_state(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides the modules: step number, and settings and codec state of all boundaries.
        `CompressedStage.load_codec_state` takes it too."""
        return self._codecs.state(self.step_number)

    def load_codec_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `codec_state` returned, or the merged codec states of all `CompressedStage`s. Raises UserError,
        before anything is changed, if a boundary is missing or was saved with another boundary, shape, dtype or
        seed."""
        self.step_number = self._codecs.load_state(state)

    @property
    def forward_nbytes(self) -> int:
        """Bytes of a forward message in training, the same for all micro-batches; 0 with a single stage."""
        return self._codecs.forward_nbytes

    @property
    def backward_nbytes(self) -> int:
        """Bytes of a backward message, the same for all micro-batches; 0 with a single stage."""
        return self._codecs.backward_nbytes

    def forward(self, *args: Any) -> Any:
        """The output for one micro-batch, as `schedule.eval` has it: no codec state changes. For validation only: a
        backward pass through the output raises RuntimeError; `step` trains."""
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
        for boundary, stage in enumerate(others):
            method = self._codecs.method(boundary, training=training)
            message_id = self._codecs.message_id(
                boundary, step=self.step_number, microbatch=microbatch, training=training
            )
            state = single_tensor(output)
            self._codecs.check_state(state, boundary)
            output = stage(cross_boundary(state, None, method, message_id))
        return output
