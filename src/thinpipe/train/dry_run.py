"""Bytes of activations that the forward pass of a segment saves for the backward pass, counted without allocating them.

The segment runs on torch's fake tensors, which have shape, dtype and device but no content, so model families,
attention kernels, autocast and activation checkpointing need no formulas of their own. The kernels are those of a CPU;
GPU kernels save about as much.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from thinpipe.config.model import ExecutionConfig
from thinpipe.models.model import Segment
from thinpipe.pipeline.stage_module import token_losses
from thinpipe.subspace import Subspace


@dataclass(frozen=True, kw_only=True)
class SavedActivations:
    """Activation memory of one micro-batch in one segment."""

    nbytes: int
    """Bytes held from the forward to the backward pass of the micro-batch."""
    peak_extra_nbytes: int
    """Additional bytes at the peak, while the segment computes."""


def count_saved_activations(
    segment: Segment, execution: ExecutionConfig, *, batch: int, tokens: int, dtype: torch.dtype
) -> SavedActivations:
    """Activation memory of a segment that is on the meta device.

    The peak adds two gradients of the size of the largest saved tensor: the logits in the segment with the output head,
    else a tensor inside an MLP. With activation checkpointing it also adds one recomputed block.
    """
    plain = replace(execution, compile=False, checkpoint_activations=False)
    all_nbytes = _saved_nbytes(segment, plain, batch, tokens, dtype)
    gradients = 2 * max(all_nbytes)
    if not execution.checkpoint_activations:
        return SavedActivations(nbytes=sum(all_nbytes), peak_extra_nbytes=gradients)
    outside = sum(_saved_nbytes(segment, replace(plain, checkpoint_activations=True), batch, tokens, dtype))
    one_block = (sum(all_nbytes) - outside) // len(segment.blocks)
    # Block inputs are counted in `outside`, except for the base of a subspace stream.
    base = batch * tokens * segment.config.dim * dtype.itemsize if isinstance(segment.space, Subspace) else 0
    return SavedActivations(nbytes=outside + base, peak_extra_nbytes=max(0, one_block) + gradients)


def _saved_nbytes(
    segment: Segment, execution: ExecutionConfig, batch: int, tokens: int, dtype: torch.dtype
) -> list[int]:
    """Bytes of every storage that autograd saves, without parameters and buffers; views of one storage count once."""
    before, segment.execution = segment.execution, execution
    saved: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    try:
        with FakeTensorMode():
            own = _fake_tensors(segment, dtype)
            ids_BW = torch.zeros(batch, tokens + 1, dtype=torch.int64)
            received = torch.zeros(batch, tokens, segment.config.state_width, dtype=dtype, requires_grad=True)
            state = received if segment.first is None else None
            with saved_tensors_hooks(save, lambda tensor: tensor):
                out: Tensor = functional_call(segment, own, (ids_BW[:, :-1], state))
                loss = out if segment.last is None else token_losses(out, ids_BW).mean()
            for tensor in own.values():
                saved.pop(tensor.untyped_storage()._cdata, None)
            if segment.last is None:
                save(loss)  # the output state: it is sent, and held until the backward pass starts from it
            return [tensor.untyped_storage().nbytes() for tensor in saved.values()]
    finally:
        segment.execution = before


def _fake_tensors(segment: Segment, dtype: torch.dtype) -> dict[str, Tensor]:
    """Fake parameters and buffers with the dtypes that `materialise` would give them."""
    own: dict[str, Tensor] = {
        name: torch.empty(parameter.shape, dtype=dtype, requires_grad=True)
        for name, parameter in segment.named_parameters()
    }
    for name, buffer in segment.named_buffers():
        wider = buffer.is_floating_point() and dtype == torch.float64
        own[name] = torch.empty(buffer.shape, dtype=dtype if wider else buffer.dtype)
    return own
