"""A PipelineStage that sends messages instead of tensors: every private name of torch's pipelining is in this file.

torch's engine posts the transfers and orders the work; this stage fills its receive slots from decoded messages and
hands it encoded ones to send. Lengths come from the boundary method. The exchange of pickled metadata, by which a
neighbour could run code here, is replaced by an error. Names used: args_recv_info, grad_recv_info, fwd_cache,
bwd_cache, stage_index_to_group_rank, _send_meta, _recv_meta.
"""

from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from thinpipe.boundary.contract import BoundaryMethod, Crossing
from thinpipe.core.errors import UserError
from thinpipe.pipeline.work import SegmentWork

KNOWN_TORCH = "2.13."
if not torch.__version__.startswith(KNOWN_TORCH):
    raise UserError(
        f"the pipeline was checked with torch {KNOWN_TORCH}x and this is {torch.__version__}: install "
        f'"torch=={KNOWN_TORCH}*", or check the names at the head of pipeline/stage.py against the new version'
    )


class MessageStage(PipelineStage):
    """One segment of the pipeline. The first is given ids, the others a state; the last gives the mean loss."""

    def __init__(
        self,
        work: SegmentWork,
        count: int,
        method: BoundaryMethod,
        *,
        seed: int,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        shape = method.shape
        ids = torch.zeros(shape.batch, shape.tokens + 1, dtype=torch.int64, device=device)
        state = torch.zeros(shape.batch, shape.tokens, shape.width, dtype=shape.dtype, device=device)
        state.requires_grad_()
        loss = torch.zeros((), dtype=torch.float32, device=device).requires_grad_()
        first, last = work.index == 0, work.index == count - 1
        super().__init__(
            work,
            work.index,
            count,
            device,
            input_args=(ids,) if first else (state,),
            output_args=(loss,) if last else (state,),
            group=group,
        )
        self.work, self.method, self.seed, self.step = work, method, seed, 0
        self.previous_here: MessageStage | None = None
        """The stage before this one, when it is in this process."""
        self.ids: dict[int, Tensor] = {}
        self._incoming: dict[int, Tensor] = {}
        self._incoming_gradients: dict[int, Tensor] = {}

    def _crossing(self, microbatch: int, boundary: int) -> Crossing:
        return Crossing(seed=self.seed, step=self.step, microbatch=microbatch, boundary=boundary)

    def _peer(self, stage_index: int) -> int:
        group = self.group or dist.group.WORLD
        assert group is not None
        return dist.get_global_rank(group, self.stage_index_to_group_rank[stage_index])

    def _receive(self, nbytes: int, stage_index: int, slots: dict[int, Tensor], chunk: int) -> list[dist.P2POp]:
        slots[chunk] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return [dist.P2POp(dist.irecv, slots[chunk], self._peer(stage_index), self.group)]

    def _send(self, message: Tensor, stage_index: int) -> list[dist.P2POp]:
        return [dist.P2POp(dist.isend, message, self._peer(stage_index), self.group)]

    # Forward

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first:
            return []
        return self._receive(self.method.forward_nbytes, self.stage_index - 1, self._incoming, fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Any, ...], *more: Any, **kwargs: Any) -> Any:
        if self.is_first:
            (self.ids[fwd_chunk_id],) = args
        elif fwd_chunk_id in self._incoming:
            self._accept(self._incoming.pop(fwd_chunk_id), fwd_chunk_id)
        self.work.begin(self.ids[fwd_chunk_id], step=self.step, microbatch=fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, args, *more, **kwargs)

    def _accept(self, message: Tensor, chunk: int) -> None:
        (slot,) = self.args_recv_info[chunk]
        self.ids[chunk], slot.buffer = self.method.unpack_forward(message, self._crossing(chunk, self.stage_index - 1))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        (state,), _ = self.fwd_cache[fwd_chunk_id]
        crossing = self._crossing(fwd_chunk_id, self.stage_index)
        message = self.method.pack_forward(self.ids[fwd_chunk_id], state, crossing)
        return self._send(message, self.stage_index + 1)

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """From a stage in this process: no network, but the same rounding, so that placement changes nothing."""
        assert self.previous_here is not None
        crossing = self._crossing(mb_index, self.stage_index - 1)
        self._accept(self.method.pack_forward(self.previous_here.ids[mb_index], prev_stage_outputs, crossing), mb_index)

    # Backward

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last or not self.has_backward:
            return []
        nbytes = self.method.backward_nbytes
        return self._receive(nbytes, self.stage_index + 1, self._incoming_gradients, bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        if bwd_chunk_id in self._incoming_gradients:
            self._accept_gradient(self._incoming_gradients.pop(bwd_chunk_id), bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def _accept_gradient(self, message: Tensor, chunk: int) -> None:
        (slot,) = self.grad_recv_info[chunk]
        slot.buffer = self.method.unpack_backward(message, self._crossing(chunk, self.stage_index))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_first or not self.has_backward:
            return []
        (gradient,) = self.bwd_cache.pop(bwd_chunk_id)
        assert gradient is not None
        message = self.method.pack_backward(gradient, self._crossing(bwd_chunk_id, self.stage_index - 1))
        return self._send(message, self.stage_index - 1)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Validation runs the same actions without gradients, and torch's V schedules ask for one all the same."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else None  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward:
            return
        (gradient,) = next_stage_bwd_outputs
        self._accept_gradient(self.method.pack_backward(gradient, self._crossing(mb_index, self.stage_index)), mb_index)

    # Nothing from the network is unpickled

    def _send_meta(self, meta: Any, dst_stage: int) -> NoReturn:  # noqa: ARG002
        raise RuntimeError(
            f"stage {self.stage_index} was asked to send metadata to stage {dst_stage}: shapes are static"
        )

    def _recv_meta(self, src_stage: int) -> NoReturn:
        raise RuntimeError(f"stage {src_stage} offers stage {self.stage_index} metadata: refused, shapes are static")
