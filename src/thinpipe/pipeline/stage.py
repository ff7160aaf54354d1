"""A PipelineStage that exchanges messages instead of tensors: every private name of torch's pipelining is in this file.

torch's engine orders the work; this stage posts its own receives, fills torch's slots from decoded messages and sends
encoded ones, so the engine is given no transfers. Lengths come from the boundary method. The exchange of pickled
metadata, by which a neighbour could run code here, is replaced by an error. Names used: args_recv_info, grad_recv_info,
fwd_cache, bwd_cache, stage_index_to_group_rank, _send_meta, _recv_meta; Schedule1F1B._num_stages.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from thinpipe.boundary.contract import BoundaryMethod, Crossing
from thinpipe.core.errors import UserError
from thinpipe.core.numerics import KNOWN_TORCH
from thinpipe.pipeline.chain import Chain
from thinpipe.pipeline.mail import Incoming, Outgoing, mail_tag
from thinpipe.transport.labels import Label, is_labelled

if not torch.__version__.startswith(KNOWN_TORCH):
    raise UserError(
        f"the pipeline was checked with torch {KNOWN_TORCH}x and this is {torch.__version__}: install "
        f'"torch=={KNOWN_TORCH}*", or check the names at the head of pipeline/stage.py against the new version'
    )


class MessageStage(PipelineStage):
    """One stage of the pipeline. The first is given ids, the others a state; the last gives the mean loss."""

    def __init__(
        self, chain: Chain, index: int, count: int, *, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        shape = chain.methods[0].shape
        ids = torch.zeros(shape.batch, shape.tokens + 1, dtype=torch.int64, device=device)
        state = torch.zeros(shape.batch, shape.tokens, shape.width, dtype=shape.dtype, device=device)
        state.requires_grad_()
        loss = torch.zeros((), dtype=torch.float32, device=device).requires_grad_()
        first, last = index == 0, index == count - 1
        super().__init__(
            chain,
            index,
            count,
            device,
            input_args=(ids,) if first else (state,),
            output_args=(loss,) if last else (state,),
            group=group,
        )
        self.chain, self.step, self.training, self.label = chain, 0, True, Label()
        self.before, self.after = chain.indices.start - 1, chain.indices.stop - 1
        """The boundaries at its two ends."""
        self.previous_here: MessageStage | None = None
        """The stage before this one, when it is in this process."""
        self.ids: dict[int, Tensor] = {}
        self.states_in: Incoming | None = None
        self.gradients_in: Incoming | None = None
        self.states_out: Outgoing | None = None
        self.gradients_out: Outgoing | None = None

    def connect(self) -> None:
        """To the neighbours in other processes; torch has placed the stages by now."""
        group = self.group or dist.group.WORLD
        assert group is not None
        places, here = self.stage_index_to_group_rank, self.stage_index
        if not self.is_first and (peer := places[here - 1]) != self.group_rank:
            names = f"states from stage {here - 1}", f"gradients to stage {here - 1}"
            self.states_in = Incoming(
                group, peer, mail_tag(self.before, forward=True), name=names[0], device=self.device
            )
            self.gradients_out = Outgoing(group, peer, mail_tag(self.before, forward=False), name=names[1])
        if not self.is_last and (peer := places[here + 1]) != self.group_rank:
            names = f"gradients from stage {here + 1}", f"states to stage {here + 1}"
            self.gradients_in = Incoming(
                group, peer, mail_tag(self.after, forward=False), name=names[0], device=self.device
            )
            self.states_out = Outgoing(group, peer, mail_tag(self.after, forward=True), name=names[1])

    def begin(self, step: int, microbatches: int, *, backward: bool) -> None:
        self.step, self.training, self.label = step, backward, self._label(step)
        if self.states_in is not None:
            self.states_in.expect(microbatches, self._method_before.forward_nbytes, self.label)
        if self.gradients_in is not None:
            expected = microbatches if backward else 0
            self.gradients_in.expect(expected, self._method_after.backward_nbytes, self.label)

    def _label(self, step: int) -> Label:
        """Of all messages of a step: a basis changes between steps only."""
        basis = self.chain.state_basis if is_labelled(self.group) else None
        if basis is None:
            return Label(step=step)
        return Label(step=step, basis_version=basis.version, basis_hash=bytes.fromhex(basis.hash)[:8])

    @property
    def _method_before(self) -> BoundaryMethod:
        return self.chain.method(self.before, training=self.training)

    @property
    def _method_after(self) -> BoundaryMethod:
        return self.chain.method(self.after, training=self.training)

    def _crossing(self, boundary: int, microbatch: int) -> Crossing:
        return self.chain.crossing(boundary, step=self.step, microbatch=microbatch, training=self.training)

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002  posted already
        return []

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
        if self.is_first:
            (self.ids[fwd_chunk_id],) = args
        elif self.states_in is not None:
            self._accept(self.states_in.take(fwd_chunk_id).to(self.device), fwd_chunk_id)
        self.chain.begin(
            self.ids[fwd_chunk_id], step=self.step, microbatch=fwd_chunk_id, backward_follows=self.training
        )
        output = super().forward_one_chunk(fwd_chunk_id, args, *more, **kwargs)
        if not self.is_first:
            self._empty(self.args_recv_info[fwd_chunk_id])
        return output

    def _accept(self, message: Tensor, chunk: int) -> None:
        (slot,) = self.args_recv_info[chunk]
        crossing = self._crossing(self.before, chunk)
        self.ids[chunk], slot.buffer = self._method_before.unpack_forward(message, crossing)
        if self.training:
            self.chain.watch.see(self.before, slot.buffer, forward=True)

    def _state_message(self, state: Tensor, chunk: int) -> Tensor:
        return self._method_after.pack_forward(self.ids[chunk], state, self._crossing(self.after, chunk))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.states_out is not None:
            (state,), _ = self.fwd_cache[fwd_chunk_id]
            self.states_out.send(self._state_message(state, fwd_chunk_id), self.label, fwd_chunk_id)
        return []

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """From a stage in this process: no network, but the same rounding, so that placement changes nothing."""
        assert self.previous_here is not None
        self._accept(self.previous_here._state_message(prev_stage_outputs, mb_index), mb_index)

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:  # noqa: ARG002  posted already
        return []

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if self.gradients_in is not None and self.has_backward:
            self._accept_gradient(self.gradients_in.take(bwd_chunk_id).to(self.device), bwd_chunk_id)
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_last and self.has_backward:
            self._empty(self.grad_recv_info[bwd_chunk_id])
        return result

    def _empty(self, slots: tuple[Any, ...]) -> None:
        """What was taken from torch's slots need not be kept until the next step fills them."""
        for slot in slots:
            slot.buffer = None

    def _accept_gradient(self, message: Tensor, chunk: int) -> None:
        (slot,) = self.grad_recv_info[chunk]
        slot.buffer = self._method_after.unpack_backward(message, self._crossing(self.after, chunk))
        self.chain.watch.see(self.after, slot.buffer, forward=False)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.gradients_out is not None and self.has_backward:
            (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
            assert gradient is not None
            crossing = self._crossing(self.before, bwd_chunk_id)
            self.gradients_out.send(self._method_before.pack_backward(gradient, crossing), self.label, bwd_chunk_id)
        return []

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Validation runs the same actions without gradients, and torch's V schedules ask for one all the same."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward:
            return
        (gradient,) = next_stage_bwd_outputs
        message = self._method_after.pack_backward(gradient, self._crossing(self.after, mb_index))
        self._accept_gradient(message, mb_index)

    # Nothing from the network is unpickled

    def _send_meta(self, meta: Any, dst_stage: int) -> NoReturn:  # noqa: ARG002
        raise RuntimeError(
            f"stage {self.stage_index} was asked to send metadata to stage {dst_stage}: shapes are static"
        )

    def _recv_meta(self, src_stage: int) -> NoReturn:
        raise RuntimeError(f"stage {src_stage} offers stage {self.stage_index} metadata: refused, shapes are static")


class EarlyForwards1F1B(Schedule1F1B):
    """1F1B that runs more forward passes before its first backward one: `extra` for each stage that comes after.

    Over a link with latency, plain 1F1B has too little under way to fill a round trip. The last stage must not wait for
    more, or its first gradient would come later by as much. What is under way costs memory, most in the first stage.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, *, extra: int = 0, **kwargs: Any) -> None:
        super().__init__(stage, n_microbatches, **kwargs)
        # Decides nothing but the number of forward passes before the first backward one.
        self._num_stages += extra * (stage.num_stages - 1 - stage.stage_index)
