"""A torch PipelineStage that exchanges encoded boundary messages instead of tensors.

torch's schedule orders the computation but gets no P2P operations: the stage posts its own receives, fills torch's
receive slots from decoded messages and sends encoded ones. The boundary method determines message lengths. torch's
exchange of pickled shape metadata, by which a neighbour could run code here, raises an error instead.

All uses of private names of torch's pipelining are in this file: args_recv_info, grad_recv_info, fwd_cache, bwd_cache,
stage_index_to_group_rank, _send_meta, _recv_meta; Schedule1F1B._num_stages.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.core.errors import UserError
from thinpipe.core.numerics import SUPPORTED_TORCH
from thinpipe.pipeline.p2p import P2PReceiver, P2PSender, p2p_tag
from thinpipe.pipeline.stage_module import StageModule
from thinpipe.transport.labels import Label, is_labelled

if not torch.__version__.startswith(SUPPORTED_TORCH):
    raise UserError(
        f"the pipeline was checked with torch {SUPPORTED_TORCH}x and this is {torch.__version__}: install "
        f'"torch=={SUPPORTED_TORCH}*", or check the names at the head of pipeline/stage.py against the new version'
    )


class MessageStage(PipelineStage):
    """One pipeline stage. Input: token ids (first stage) or a state. Output: a state, or the mean loss (last stage)."""

    def __init__(
        self,
        stage_module: StageModule,
        index: int,
        count: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        shape = stage_module.methods[0].shape
        ids = torch.zeros(shape.batch, shape.tokens + 1, dtype=torch.int64, device=device)
        state = torch.zeros(shape.batch, shape.tokens, shape.width, dtype=shape.dtype, device=device)
        state.requires_grad_()
        loss = torch.zeros((), dtype=torch.float32, device=device).requires_grad_()
        first, last = index == 0, index == count - 1
        super().__init__(
            stage_module,
            index,
            count,
            device,
            input_args=(ids,) if first else (state,),
            output_args=(loss,) if last else (state,),
            group=group,
        )
        self.stage_module, self.step, self.training, self.label = stage_module, 0, True, Label()
        self.before, self.after = stage_module.indices.start - 1, stage_module.indices.stop - 1
        """Indices of the boundaries before and after this stage."""
        self.local_previous: MessageStage | None = None
        """Previous stage, if it is in this process."""
        self.ids: dict[int, Tensor] = {}
        self.states_in: P2PReceiver | None = None
        self.gradients_in: P2PReceiver | None = None
        self.states_out: P2PSender | None = None
        self.gradients_out: P2PSender | None = None

    def connect(self) -> None:
        """Creates senders and receivers for neighbouring stages in other processes.

        Call after the schedule was built: it determines the rank of each stage.
        """
        group = self.group or dist.group.WORLD
        assert group is not None
        places, here = self.stage_index_to_group_rank, self.stage_index
        if not self.is_first and (peer := places[here - 1]) != self.group_rank:
            names = f"states from stage {here - 1}", f"gradients to stage {here - 1}"
            self.states_in = P2PReceiver(
                group, peer, p2p_tag(self.before, forward=True), name=names[0], device=self.device
            )
            self.gradients_out = P2PSender(group, peer, p2p_tag(self.before, forward=False), name=names[1])
        if not self.is_last and (peer := places[here + 1]) != self.group_rank:
            names = f"gradients from stage {here + 1}", f"states to stage {here + 1}"
            self.gradients_in = P2PReceiver(
                group, peer, p2p_tag(self.after, forward=False), name=names[0], device=self.device
            )
            self.states_out = P2PSender(group, peer, p2p_tag(self.after, forward=True), name=names[1])

    def begin(self, step: int, microbatches: int, *, backward: bool) -> None:
        """Starts a step (or validation, with `backward` False) and posts its receives."""
        self.step, self.training, self.label = step, backward, self._label(step)
        if self.states_in is not None:
            self.states_in.expect(microbatches, self._method_before.forward_nbytes, self.label)
        if self.gradients_in is not None:
            expected = microbatches if backward else 0
            self.gradients_in.expect(expected, self._method_after.backward_nbytes, self.label)

    def _label(self, step: int) -> Label:
        """Label of all messages of a step; the basis changes only between steps."""
        basis = self.stage_module.state_basis if is_labelled(self.group) else None
        if basis is None:
            return Label(step=step)
        return Label(step=step, basis_version=basis.version, basis_hash=bytes.fromhex(basis.hash)[:8])

    @property
    def _method_before(self) -> BoundaryMethod:
        return self.stage_module.method(self.before, training=self.training)

    @property
    def _method_after(self) -> BoundaryMethod:
        return self.stage_module.method(self.after, training=self.training)

    def _message_id(self, boundary: int, microbatch: int) -> MessageId:
        return self.stage_module.message_id(boundary, step=self.step, microbatch=microbatch, training=self.training)

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002  posted by `begin`
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
        if self.is_first:
            (self.ids[fwd_chunk_id],) = args
        elif self.states_in is not None:
            self._accept(self.states_in.receive(fwd_chunk_id).to(self.device), fwd_chunk_id)
        self.stage_module.begin(
            self.ids[fwd_chunk_id], step=self.step, microbatch=fwd_chunk_id, backward_follows=self.training
        )
        output = super().forward_one_chunk(fwd_chunk_id, args, *more, **kwargs)
        if not self.is_first:
            self._release_slots(self.args_recv_info[fwd_chunk_id])
        return output

    def _accept(self, message: Tensor, chunk: int) -> None:
        (slot,) = self.args_recv_info[chunk]
        message_id = self._message_id(self.before, chunk)
        self.ids[chunk], slot.buffer = self._method_before.unpack_forward(message, message_id)
        if self.training:
            self.stage_module.sanity.observe(self.before, slot.buffer, forward=True)

    def _state_message(self, state: Tensor, chunk: int) -> Tensor:
        return self._method_after.pack_forward(self.ids[chunk], state, self._message_id(self.after, chunk))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.states_out is not None:
            (state,), _ = self.fwd_cache[fwd_chunk_id]
            self.states_out.send(self._state_message(state, fwd_chunk_id), self.label, fwd_chunk_id)
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Input from a stage in this process: encoded and decoded like a sent message, so placement does not change
        results."""
        assert self.local_previous is not None
        self._accept(self.local_previous._state_message(prev_stage_outputs, mb_index), mb_index)

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002  posted by `begin`
        return []

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.gradients_in is not None and self.has_backward:
            self._accept_gradient(self.gradients_in.receive(bwd_chunk_id).to(self.device), bwd_chunk_id)
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
        slot.buffer = self._method_after.unpack_backward(message, self._message_id(self.after, chunk))
        self.stage_module.sanity.observe(self.after, slot.buffer, forward=False)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.gradients_out is not None and self.has_backward:
            (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
            assert gradient is not None
            message_id = self._message_id(self.before, bwd_chunk_id)
            self.gradients_out.send(self._method_before.pack_backward(gradient, message_id), self.label, bwd_chunk_id)
        return []

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Gradient for the previous stage in this process; None in validation, where V schedules also ask for one."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward:
            return
        (gradient,) = next_stage_bwd_outputs
        message = self._method_after.pack_backward(gradient, self._message_id(self.after, mb_index))
        self._accept_gradient(message, mb_index)

    # Metadata exchange is disabled: nothing from the network is unpickled

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
