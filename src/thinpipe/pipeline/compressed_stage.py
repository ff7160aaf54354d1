"""A compressed pipeline stage for any `nn.Module`: takes the place of torch's `PipelineStage` in a pipeline of your own
whose stages exchange one tensor [B, T, W].

`CompressedSequential` is the same pipeline in one process.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.boundary.codec import boundary_config, message_shape
from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.boundary.registry import make_method
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.core.errors import UserError
from thinpipe.pipeline.stage import EncodedStage
from thinpipe.transport.labels import Label


class CompressedStage(EncodedStage):
    """A `torch.distributed.pipelining.PipelineStage` whose messages are compressed, for any of torch's schedules.

    Every module but the first maps a tensor of `shape` to its output, and every module but the last returns one tensor
    of `shape`; the first may take any input, and the last may return anything that the schedule's `loss_fn` takes.
    States are rounded to nearest, gradients stochastically, with random numbers that are a function of seed, step,
    micro-batch and boundary: the result does not depend on the schedule or on the placement of the stages, and
    `CompressedSequential` has the same losses and gradients, bit for bit on a CPU. `schedule.eval` sends states as in
    training (`BoundaryConfig.at_inference`) and changes no codec state.

    Messages are bytes in host memory: `group` must be able to send CPU tensors, as gloo does. The last messages of a
    step may still be on their way when the step returns: call `dist.barrier()` before `dist.destroy_process_group()`.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        shape: tuple[int, int, int],
        boundary: str | BoundaryConfig = "int4",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`shape`: of the tensor between two stages, B samples of a micro-batch, T tokens, W numbers. `boundary`: a
        number format for both directions (fp32, bf16, int8, int4), or the settings of each. `dtype`: data type of the
        tensor. `shape`, `boundary`, `dtype` and `seed` must be the same in all stages."""
        state = torch.zeros(shape, dtype=dtype, device=device).requires_grad_()
        # torch compares these examples with what it sees only under TORCH_DISTRIBUTED_DEBUG=DETAIL.
        anything = torch.zeros(0, device=device)
        super().__init__(
            submodule,
            stage_index,
            num_stages,
            input_args=anything if stage_index == 0 else state,
            output_args=anything if stage_index == num_stages - 1 else state,
            before=stage_index - 1,
            after=stage_index,
            device=device,
            group=group,
        )
        self.step = -1
        """Number of the training step, from 0. Set it, or load the codec state, to go on with an earlier run."""
        self._state, self._seed = state, seed
        self._step_has_begun = False
        config, shape_and_dtype = boundary_config(boundary), message_shape(shape, dtype)
        self._methods = {
            index: make_method(config, shape_and_dtype, in_subspace=False, seed=seed)
            for index in (self.before, self.after)
            if 0 <= index < num_stages - 1
        }

    def codec_state(self) -> dict[str, Tensor]:
        """What a checkpoint of the stage needs besides its module: step and codec state. To be called between steps."""
        state = {"step": torch.tensor(self.step)}
        for side, index in (("before", self.before), ("after", self.after)):
            if index in self._methods:
                method = self._methods[index]
                part = method.receiver_state() if side == "before" else method.sender_state()
                state |= {f"{side}.{name}": tensor for name, tensor in part.items()}
        return state

    def load_codec_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `codec_state` returned. Raises UserError if it is of another boundary."""
        if "step" not in state:
            raise UserError("this is no codec state of a stage: it has no step")
        self.step = int(state["step"])
        for side, index in (("before", self.before), ("after", self.after)):
            if index in self._methods:
                part = {
                    name.removeprefix(f"{side}."): value for name, value in state.items() if name.startswith(f"{side}.")
                }
                method = self._methods[index]
                method.load_receiver_state(part) if side == "before" else method.load_sender_state(part)

    @property
    def forward_nbytes(self) -> int:
        """Bytes of a forward message, the same for all micro-batches; 0 with a single stage."""
        return next((method.states.compressor.nbytes for method in self._methods.values()), 0)

    @property
    def backward_nbytes(self) -> int:
        """Bytes of a backward message, the same for all micro-batches; 0 with a single stage."""
        return next((method.backward_nbytes for method in self._methods.values()), 0)

    # Steps. Every schedule calls `clear_runtime_states` at the start of a step, before the number of micro-batches is
    # known, and then asks for receives or runs a forward pass: the first of these begins the step.

    def clear_runtime_states(self) -> None:
        super().clear_runtime_states()
        self._step_has_begun = False

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._begin_step()
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
        self._begin_step()
        return super().forward_one_chunk(fwd_chunk_id, args, *more, **kwargs)

    def _begin_step(self) -> None:
        if self._step_has_begun:
            return
        self._step_has_begun = True
        if self.states_in is None and self.gradients_in is None:
            self.connect()
        self.step += self.has_backward
        self.label = Label(step=max(self.step, 0))
        if self.states_in is not None:
            method = self._method(self.before)
            self.states_in.expect(self.microbatches, method.states.compressor.nbytes, self.label)
        if self.gradients_in is not None:
            expected = self.microbatches if self.has_backward else 0
            self.gradients_in.expect(expected, self._method(self.after).backward_nbytes, self.label)

    # Messages

    def _method(self, boundary: int) -> BoundaryMethod:
        method = self._methods[boundary]
        return method if self.has_backward else method.at_inference

    def _message_id(self, boundary: int, microbatch: int) -> MessageId:
        return MessageId(
            seed=self._seed, step=self.step, microbatch=microbatch, boundary=boundary, training=self.has_backward
        )

    def encode_state(self, state: Tensor, microbatch: int) -> Tensor:
        if state.shape != self._state.shape:
            raise ValueError(
                f"stage {self.stage_index} returned a tensor of {tuple(state.shape)}, and {tuple(self._state.shape)} "
                "were stated"
            )
        return self._method(self.after).pack_state(state, self._message_id(self.after, microbatch))

    def decode_state(self, message: Tensor, microbatch: int) -> Tensor:
        return self._method(self.before).unpack_state(message, self._message_id(self.before, microbatch))

    def encode_gradient(self, gradient: Tensor | None, microbatch: int) -> Tensor:
        found = torch.zeros_like(self._state, requires_grad=False) if gradient is None else gradient
        return self._method(self.before).pack_backward(found, self._message_id(self.before, microbatch))

    def decode_gradient(self, message: Tensor, microbatch: int) -> Tensor:
        return self._method(self.after).unpack_backward(message, self._message_id(self.after, microbatch))
