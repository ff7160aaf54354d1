"""Cross-entropy of the next tokens from the states that the output head reads, without all logits at once.

Logits of more than `config.model_family.MAX_LOGITS` numbers are computed for one chunk of the vocabulary after the
other, in the forward and again in the backward pass. Chunks of the vocabulary rather than of the tokens, because the
gradient of a row of the head is then one sum over all tokens, as without chunks: nothing is accumulated in the
precision of weights, and no second matrix of the head's size is needed. Only the gradient of the states is summed over
chunks, in float32.

torch's own `linear_cross_entropy` (since 2.13) is not used: its losses have the precision of the states, which is
bfloat16 in the recipe bf16, what it accumulates in depends on the device, and autocast does not reach it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.config.model_family import vocabulary_chunk


def token_losses(states_BTD: Tensor, head_VD: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy of every token, computed from logits in float32 or, for float64 states, in float64."""
    targets_N, rows = targets_BT.flatten(), vocabulary_chunk(targets_BT.numel(), head_VD.shape[0])
    if rows == head_VD.shape[0]:
        logits_NV = F.linear(states_BTD, head_VD).flatten(0, 1)
        return F.cross_entropy(logits_NV.to(_loss_dtype(logits_NV)), targets_N, reduction="none")
    device = states_BTD.device.type
    if torch.is_autocast_enabled(device):
        states_BTD = states_BTD.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        losses_N: Tensor = _ChunkedLosses.apply(states_BTD.flatten(0, 1), head_VD, targets_N, rows)  # type: ignore[no-untyped-call]
    return losses_N


def _loss_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states_ND: Tensor, head_VD: Tensor, targets_N: Tensor, rows: int) -> Tensor:
        largest_N = states_ND.new_full((len(targets_N),), -torch.inf, dtype=_loss_dtype(states_ND))
        sums_N = torch.zeros_like(largest_N)  # of exp(logit - largest) over the chunks so far
        target_logits_N = torch.full_like(largest_N, torch.nan)  # stays so for a target that is no token
        for chunk, chunk_RD in _chunks(head_VD, rows):
            logits_NR = F.linear(states_ND, chunk_RD.to(states_ND.dtype)).to(_loss_dtype(states_ND))
            inside_N, columns_N1 = _columns(targets_N, chunk)
            target_logits_N = torch.where(inside_N, logits_NR.gather(1, columns_N1).squeeze(1), target_logits_N)
            before_N, largest_N = largest_N, torch.maximum(largest_N, logits_NR.amax(dim=1))
            sums_N = sums_N * (before_N - largest_N).exp() + logits_NR.sub_(largest_N[:, None]).exp_().sum(dim=1)
            del logits_NR  # not beside those of the next chunk
        ctx.save_for_backward(states_ND, head_VD, targets_N, largest_N, sums_N)
        ctx.rows = rows
        return sums_N.log() + (largest_N - target_logits_N)

    @staticmethod
    def backward(ctx: Any, gradient_N: Tensor) -> tuple[Tensor, Tensor, None, None]:
        states_ND, head_VD, targets_N, largest_N, sums_N = ctx.saved_tensors
        states_gradient_ND = torch.zeros_like(states_ND, dtype=_loss_dtype(states_ND))
        head_gradient_VD = torch.empty_like(head_VD)
        for chunk, chunk_RD in _chunks(head_VD, ctx.rows):
            chunk_RD = chunk_RD.to(states_ND.dtype)
            gradient_NR = F.linear(states_ND, chunk_RD).to(_loss_dtype(states_ND))  # logits, then changed in place
            gradient_NR.sub_(largest_N[:, None]).exp_().div_(sums_N[:, None])
            inside_N, columns_N1 = _columns(targets_N, chunk)
            gradient_NR.scatter_(1, columns_N1, gradient_NR.gather(1, columns_N1) - inside_N[:, None].to(gradient_NR))
            gradient_NR = gradient_NR.mul_(gradient_N[:, None]).to(states_ND.dtype)
            states_gradient_ND += gradient_NR @ chunk_RD
            head_gradient_VD[chunk] = gradient_NR.mT @ states_ND
            del gradient_NR
        return states_gradient_ND.to(states_ND.dtype), head_gradient_VD, None, None


def _chunks(head_VD: Tensor, rows: int) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, head_VD.shape[0], rows):
        chunk = slice(start, min(start + rows, head_VD.shape[0]))
        yield chunk, head_VD[chunk]


def _columns(targets_N: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
    """Which targets are in a chunk of the vocabulary, and their columns there; column 0 or the last for others."""
    columns_N = targets_N - chunk.start
    inside_N = (columns_N >= 0) & (targets_N < chunk.stop)
    return inside_N, columns_N.clamp(0, chunk.stop - chunk.start - 1)[:, None]
