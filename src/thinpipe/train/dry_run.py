"""What the forward pass of a segment leaves behind for the backward pass, counted without memory and without numbers.

The segment runs on torch's fake tensors, which have shapes, dtypes and a device but no content. So families, attention
kernels, autocast and activation checkpointing need no formulas of their own. Kernels are those of a CPU; a GPU's keep
about as much.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from thinpipe.models.config import Execution
from thinpipe.models.model import Segment
from thinpipe.pipeline.chain import token_losses
from thinpipe.subspace import Subspace


@dataclass(frozen=True, kw_only=True)
class Kept:
    """By one micro-batch."""

    nbytes: int
    """From its forward to its backward pass."""
    at_work_nbytes: int
    """More, for as long as the segment computes."""


def count_kept(segment: Segment, execution: Execution, *, batch: int, tokens: int, dtype: torch.dtype) -> Kept:
    """Of a segment on the meta device.

    While it computes, gradients come beside what is kept: two as large as the largest tensor, which are those of the
    logits where the head is, and else those inside an MLP.
    """
    plain = replace(execution, compile=False, checkpoint_activations=False)
    all_nbytes = _saved_nbytes(segment, plain, batch, tokens, dtype)
    gradients = 2 * max(all_nbytes)
    if not execution.checkpoint_activations:
        return Kept(nbytes=sum(all_nbytes), at_work_nbytes=gradients)
    outside = sum(_saved_nbytes(segment, replace(plain, checkpoint_activations=True), batch, tokens, dtype))
    one_block = (sum(all_nbytes) - outside) // len(segment.blocks)
    # What enters blocks is among what is kept outside of them, but for the base of a confined stream.
    base = batch * tokens * segment.config.dim * dtype.itemsize if isinstance(segment.space, Subspace) else 0
    return Kept(nbytes=outside + base, at_work_nbytes=max(0, one_block) + gradients)


def _saved_nbytes(segment: Segment, execution: Execution, batch: int, tokens: int, dtype: torch.dtype) -> list[int]:
    """Of every tensor that autograd keeps, parameters and buffers aside; views count once."""
    before, segment.execution = segment.execution, execution
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    try:
        with FakeTensorMode():
            own = _fake_tensors(segment, dtype)
            ids_BW = torch.zeros(batch, tokens + 1, dtype=torch.int64)
            received = torch.zeros(batch, tokens, segment.config.state_width, dtype=dtype, requires_grad=True)
            state = received if segment.first is None else None
            with saved_tensors_hooks(keep, lambda tensor: tensor):
                out: Tensor = functional_call(segment, own, (ids_BW[:, :-1], state))
                loss = out if segment.last is None else token_losses(out, ids_BW).mean()
            for tensor in own.values():
                kept.pop(tensor.untyped_storage()._cdata, None)
            if segment.last is None:
                keep(loss)  # it is sent, and the backward pass begins at it
            return [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    finally:
        segment.execution = before


def _fake_tensors(segment: Segment, dtype: torch.dtype) -> dict[str, Tensor]:
    """With the dtypes that `materialise` gives."""
    own: dict[str, Tensor] = {
        name: torch.empty(parameter.shape, dtype=dtype, requires_grad=True)
        for name, parameter in segment.named_parameters()
    }
    for name, buffer in segment.named_buffers():
        wider = buffer.is_floating_point() and dtype == torch.float64
        own[name] = torch.empty(buffer.shape, dtype=dtype if wider else buffer.dtype)
    return own
