"""A torch PipelineStage that exchanges encoded messages instead of tensors: `EncodedStage`, which moves the messages.
What they hold, subclasses say: `MessageStage` (`pipeline/message_stage.py`), `CompressedStage`.

torch's schedule orders the computation but gets no P2P operations: the stage posts its own receives, fills torch's
receive slots from decoded messages and sends encoded ones. The boundary method determines message lengths. torch's
exchange of pickled shape metadata, by which a neighbour could run code here, raises an error instead.

torch lets its stages agree that shapes are static whenever training and validation alternate: up to 2.14 by messages
from stage to stage (`_warmup_forward_vote`), from 2.15 by an all-reduce of the schedule, and with tensors on the device
of the stage, which a group for CPU tensors cannot send. Here shapes are always static. Nothing is exchanged: the stage
answers by itself, and shows torch a map with all stages in this process (`stage_index_to_group_rank`), for which the
schedule reduces nothing.

All uses of undocumented names of torch's pipelining are in this file; `pipeline/torch_names.py` lists and checks them.
"""

from abc import abstractmethod
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinpipe.pipeline.in_process_boundary import single_tensor
from thinpipe.pipeline.p2p import P2PReceiver, P2PSender, p2p_tag
from thinpipe.pipeline.torch_names import check_torch
from thinpipe.transport.labels import Label

check_torch()


class EncodedStage(PipelineStage):
    """A pipeline stage that exchanges encoded messages: one state forward and one gradient back per micro-batch.

    Subclasses encode and decode. A message to a stage in the same process is encoded and decoded too, so that placement
    does not change results.
    """

    def __init__(
        self,
        submodule: nn.Module,
        index: int,
        count: int,
        *,
        input_args: Tensor,
        output_args: Tensor,
        before: int,
        after: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        """`input_args`, `output_args`: example tensors. `before`, `after`: boundary indices on both sides."""
        super().__init__(
            submodule, index, count, device, input_args=(input_args,), output_args=(output_args,), group=group
        )
        # torch's comparison of tensors with the examples, under TORCH_DISTRIBUTED_DEBUG=DETAIL. Messages have checks of
        # their own, and the first input and the last output may be anything.
        self._runtime_validate = False
        self.before, self.after, self.label = before, after, Label()
        self._microbatches: dict[bool, int] = {}
        """Micro-batches of a step with backward passes (True) and without (False): the fewest of all schedules that
        have run such steps with this stage."""
        self._backwards = 0
        """Backward passes of this step so far."""
        self._outputs: dict[int, Any] = {}
        """Outputs of the module that have not been encoded yet, by micro-batch."""
        self.states_in: P2PReceiver | None = None
        self.gradients_in: P2PReceiver | None = None
        self.states_out: P2PSender | None = None
        self.gradients_out: P2PSender | None = None

    @abstractmethod
    def encode_state(self, state: Tensor, microbatch: int) -> Tensor:
        """The forward message, uint8."""

    @abstractmethod
    def decode_state(self, message: Tensor, microbatch: int) -> Tensor: ...

    @abstractmethod
    def encode_gradient(self, gradient: Tensor | None, microbatch: int) -> Tensor:
        """The backward message, uint8. A gradient is None if the output of the stage does not depend on its input."""

    @abstractmethod
    def decode_gradient(self, message: Tensor, microbatch: int) -> Tensor: ...

    def connect(self) -> None:
        """Creates senders and receivers for neighbouring stages in other processes.

        Call after the schedule was built: it determines the rank of each stage.
        """
        group = self.group or dist.group.WORLD
        assert group is not None
        places, here = self._group_ranks, self.stage_index
        if not self.is_first and (peer := places[here - 1]) != self.group_rank:
            forward, backward = (p2p_tag(self.before, forward=forward) for forward in (True, False))
            names = f"states from stage {here - 1}", f"gradients to stage {here - 1}"
            self.states_in = P2PReceiver(group, peer, forward, name=names[0], device=self.device)
            self.gradients_out = P2PSender(group, peer, backward, name=names[1], device=self.device)
        if not self.is_last and (peer := places[here + 1]) != self.group_rank:
            forward, backward = (p2p_tag(self.after, forward=forward) for forward in (True, False))
            names = f"states to stage {here + 1}", f"gradients from stage {here + 1}"
            self.states_out = P2PSender(group, peer, forward, name=names[0], device=self.device)
            self.gradients_in = P2PReceiver(group, peer, backward, name=names[1], device=self.device)

    @property
    @abstractmethod
    def state_nbytes(self) -> int:
        """Bytes of a message from the previous stage."""

    @property
    @abstractmethod
    def gradient_nbytes(self) -> int:
        """Bytes of a message from the next stage."""

    def expect_messages(self, microbatches: int, *, backward: bool) -> None:
        """Posts the receives of a step of at least `microbatches` micro-batches, with or without backward passes."""
        if self.states_in is not None:
            self.states_in.expect(microbatches, self.state_nbytes, self.label)
        if self.gradients_in is not None:
            self.gradients_in.expect(microbatches if backward else 0, self.gradient_nbytes, self.label)

    def clear_runtime_states(self) -> None:
        """Called by every schedule at the start of a step, also after one that raised an error."""
        super().clear_runtime_states()
        self._backwards = 0
        self._outputs.clear()
        for slots in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            self._release_slots(slots)

    @property
    def stage_index_to_group_rank(self) -> dict[int, int]:
        """The map that torch reads: all stages are in this process, so there is nobody to agree with on shapes. The map
        that the schedule has assigned is `_group_ranks`."""
        return dict.fromkeys(self._group_ranks, self.group_rank)

    @stage_index_to_group_rank.setter
    def stage_index_to_group_rank(self, group_ranks: dict[int, int]) -> None:
        self._group_ranks = group_ranks

    @property
    def _next_is_here(self) -> bool:
        return not self.is_last and self._group_ranks[self.stage_index + 1] == self.group_rank

    def _prepare_forward_infra(
        self, num_microbatches: int, args: Any, kwargs: Any = None, has_backward: bool = False
    ) -> Any:
        """Called by a schedule in its first step with backward passes, and in its first step without."""
        fewest = self._microbatches.get(has_backward, num_microbatches)
        self._microbatches[has_backward] = min(fewest, num_microbatches)
        return super()._prepare_forward_infra(num_microbatches, args, kwargs, has_backward)

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002  posted by the stage itself
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
        """The output of the stage, or its encoding for a next stage in this process, which gets what this returns."""
        if self.states_in is not None:
            self._accept_state(self.states_in.receive(fwd_chunk_id), fwd_chunk_id)
        self.before_forward(fwd_chunk_id, args)
        output = super().forward_one_chunk(fwd_chunk_id, args, *more, **kwargs)
        if not self.is_first:
            self._release_slots(self.args_recv_info[fwd_chunk_id])
        if not self.is_last:
            self._outputs[fwd_chunk_id] = output
        return self._state_message(fwd_chunk_id) if self._next_is_here else output

    def before_forward(self, microbatch: int, args: tuple[Any, ...]) -> None:
        """Called before the module runs, after the state was decoded; `args` are those of the schedule's `step`."""

    def _accept_state(self, message: Tensor, chunk: int) -> None:
        (slot,) = self.args_recv_info[chunk]
        slot.buffer = self.decode_state(message, chunk)

    def _state_message(self, chunk: int) -> Tensor:
        return self.encode_state(single_tensor(self._outputs.pop(chunk)), chunk)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.states_out is not None:
            self.states_out.send(self._state_message(fwd_chunk_id), self.label, fwd_chunk_id)
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """The message that `forward_one_chunk` of the previous stage, in this process, has returned."""
        self._accept_state(prev_stage_outputs, mb_index)

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002  posted by the stage itself
        return []

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError if the backward passes are not in the order of the micro-batches, on which codec state
        and receives rely."""
        if self.has_backward and bwd_chunk_id != self._backwards:
            raise RuntimeError(
                f"the schedule runs the backward pass of micro-batch {bwd_chunk_id} before that of {self._backwards}, "
                "as ScheduleLoopedBFS does: compressed stages need micro-batches in order. Schedules that work: GPipe, "
                "1F1B, Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV"
            )
        self._backwards += 1
        if self.gradients_in is not None and self.has_backward:
            self._accept_gradient(self.gradients_in.receive(bwd_chunk_id), bwd_chunk_id)
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last and self.has_backward:
            self._release_slots(self.grad_recv_info[bwd_chunk_id])
        return result

    def _release_slots(self, slots: tuple[Any, ...]) -> None:
        """Frees consumed receive buffers, which torch would hold until the next step."""
        for slot in slots:
            slot.buffer = None

    def _accept_gradient(self, message: Tensor, chunk: int) -> None:
        (slot,) = self.grad_recv_info[chunk]
        slot.buffer = self.decode_gradient(message, chunk)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.gradients_out is not None and self.has_backward:
            self.gradients_out.send(self._gradient_message(bwd_chunk_id), self.label, bwd_chunk_id)
        return []

    def _gradient_message(self, chunk: int) -> Tensor:
        (gradient,) = super().get_local_bwd_output(chunk)  # type: ignore[no-untyped-call]
        return self.encode_gradient(gradient, chunk)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Message with the gradient for the previous stage, in this process; None in validation, where V schedules also
        ask for one."""
        return self._gradient_message(mb_index) if self.has_backward else None

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The message that `get_local_bwd_output` of the next stage, in this process, has returned."""
        if self.has_backward:
            self._accept_gradient(next_stage_bwd_outputs, mb_index)

    # Shapes are static and stages need not agree on that: no message but those above, and nothing is unpickled. torch
    # calls the first two up to 2.14.

    def _warmup_forward_vote(self, has_backward: bool, received_acc: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, received_result: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.ones(1, dtype=torch.int32)

    def _send_meta(self, meta: Any, dst_stage: int) -> NoReturn:  # noqa: ARG002
        raise RuntimeError(
            f"stage {self.stage_index} was asked to send metadata to stage {dst_stage}: shapes are static"
        )

    def _recv_meta(self, src_stage: int) -> NoReturn:
        raise RuntimeError(f"stage {src_stage} offers stage {self.stage_index} metadata: refused, shapes are static")


class EarlyForwards1F1B(Schedule1F1B):
    """1F1B with additional warm-up forward passes: `extra` for each later stage.

    Over a link with latency, plain 1F1B has too few micro-batches in flight to cover a round trip. The last stage gets
    no additional ones: they would only delay its first gradient. Micro-batches in flight cost memory, most in the first
    stage.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, *, extra: int = 0, **kwargs: Any) -> None:
        super().__init__(stage, n_microbatches, **kwargs)
        # torch's Schedule1F1B uses _num_stages only for the number of warm-up forward passes.
        self._num_stages += extra * (stage.num_stages - 1 - stage.stage_index)
