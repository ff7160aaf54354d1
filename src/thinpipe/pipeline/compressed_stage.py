"""A compressed pipeline stage for any `nn.Module`: takes the place of torch's `PipelineStage` in a pipeline of your own
whose stages exchange one tensor [B, T, W].

`CompressedSequential` is the same pipeline in one process.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.pipeline.boundary_codecs import SETTINGS_NBYTES, BoundaryCodecs
from thinpipe.pipeline.stage import EncodedStage
from thinpipe.transport.labels import Label


class CompressedStage(EncodedStage):
    """A `torch.distributed.pipelining.PipelineStage` whose messages are compressed, for the schedules GPipe, 1F1B,
    Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble and DualPipeV of torch. LoopedBFS, which runs backward passes
    in reverse order of the micro-batches, raises RuntimeError at its first backward pass.

    Every module but the first maps a tensor of `shape` to its output, and every module but the last returns one tensor
    of `shape` (or a tuple with that tensor alone). The first may take any input. The last returns what the schedule's
    `loss_fn` takes: a tensor, or a plain tuple or list of tensors, and no dictionary or output class.

    States are rounded to nearest. Gradients are rounded stochastically to integers (int8, int4, quantise), with random
    numbers that are a function of seed, step, micro-batch and boundary, and to nearest even in bf16 and lowrank. The
    result does not depend on the schedule or on the placement of the stages, and `CompressedSequential` has the same
    losses and gradients, bit for bit on a CPU. `schedule.eval` sends states as in training
    (`BoundaryConfig.at_inference`) and changes no codec state. Several schedules may run one stage in turn, also with
    other numbers of micro-batches, of the same shape.

    Messages are bytes in host memory: `group` must be able to send CPU tensors, as gloo does. At the start of a step
    the messages of the step before the previous one have left, so those of at most two steps queue up at a slow
    receiver. The last messages of a step may still be on their way when the step returns: call `dist.barrier()` before
    `dist.destroy_process_group()`.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        *,
        shape: Sequence[int],
        boundary: str | BoundaryConfig = "int4",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`shape`: of the tensor between two stages, B samples of a micro-batch, T tokens, W numbers. `boundary`: a
        number format for both directions (fp32, bf16, int8, int4), or the settings of each. `dtype`: data type of the
        tensor as the next stage gets it, float32 or bfloat16. `shape`, `boundary`, `dtype` and `seed` must be the
        same in all stages: in its first step a stage raises UserError if those of the previous one differ."""
        device = torch.device(device)
        codecs = BoundaryCodecs((stage_index,), num_stages, shape=shape, boundary=boundary, dtype=dtype, seed=seed)
        state, anything = torch.zeros(shape, dtype=dtype, device=device).requires_grad_(), torch.zeros(0, device=device)
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
        self.step_number = -1
        """Number of the training step, from 0; -1 before the first."""
        self._codecs, self._state = codecs, state
        self._step_has_begun = False

    def codec_state(self) -> dict[str, Tensor]:
        """What a checkpoint of the stage needs besides its module: step number, and settings and codec state of the
        boundaries before and after the stage. To be called between steps. The codec states of all stages, merged, are
        that of `CompressedSequential`."""
        return self._codecs.state(self.step_number)

    def load_codec_state(self, state: Mapping[str, Tensor]) -> None:
        """Restores what `codec_state` returned. Raises UserError, before anything is changed, if the codec state is of
        another stage or was saved with another boundary, shape, dtype or seed."""
        self.step_number = self._codecs.load_state(state)

    @property
    def forward_nbytes(self) -> int:
        """Bytes of a forward message in training, the same for all micro-batches; 0 with a single stage."""
        return self._codecs.forward_nbytes

    @property
    def backward_nbytes(self) -> int:
        """Bytes of a backward message, the same for all micro-batches; 0 with a single stage."""
        return self._codecs.backward_nbytes

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
            self._compare_settings()
        self.step_number += self.has_backward
        self.label = Label(step=max(self.step_number, 0))
        self.expect_messages(self._microbatches[self.has_backward], backward=self.has_backward)
        for sender in (self.states_out, self.gradients_out):
            if sender is not None:
                sender.begin_step()

    def _compare_settings(self) -> None:
        """Before the first message. Only a stage waits, for the one before it, so that all stages come to their turn in
        every schedule; it posts no other receive until then, since gloo ends a process that gets too long a message."""
        if self.states_out is not None:
            self.states_out.send(self._codecs.settings_message(self.step_number).to(self.device), Label(), 0)
        if self.states_in is not None:
            self.states_in.expect(1, SETTINGS_NBYTES, Label())
            message = self.states_in.receive(0)
            self._codecs.compare_settings(message, self.step_number, previous=self.stage_index - 1)

    @property
    def state_nbytes(self) -> int:
        return self._method(self.before).states.compressor.nbytes

    @property
    def gradient_nbytes(self) -> int:
        return self._method(self.after).backward_nbytes

    # Messages

    def _method(self, boundary: int) -> BoundaryMethod:
        return self._codecs.method(boundary, training=self.has_backward)

    def _message_id(self, boundary: int, microbatch: int) -> MessageId:
        return self._codecs.message_id(
            boundary, step=self.step_number, microbatch=microbatch, training=self.has_backward
        )

    def encode_state(self, state: Tensor, microbatch: int) -> Tensor:
        self._codecs.check_state(state, self.stage_index)
        return self._method(self.after).pack_state(state, self._message_id(self.after, microbatch))

    def decode_state(self, message: Tensor, microbatch: int) -> Tensor:
        return self._method(self.before).unpack_state(message, self._message_id(self.before, microbatch))

    def encode_gradient(self, gradient: Tensor | None, microbatch: int) -> Tensor:
        found = torch.zeros_like(self._state, requires_grad=False) if gradient is None else gradient
        return self._method(self.before).pack_backward(found, self._message_id(self.before, microbatch))

    def decode_gradient(self, message: Tensor, microbatch: int) -> Tensor:
        return self._method(self.after).unpack_backward(message, self._message_id(self.after, microbatch))
