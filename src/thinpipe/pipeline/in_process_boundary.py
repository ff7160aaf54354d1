"""Boundary inside one process: states and gradients are encoded and decoded as if they were sent to another process, so
that the placement of stages does not change a bit of the result."""

from typing import Any

import torch
from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.pipeline.sanity import MessageSanityCheck


def cross_boundary(
    state: Tensor,
    ids_BW: Tensor | None,
    method: BoundaryMethod,
    message_id: MessageId,
    sanity: MessageSanityCheck | None = None,
) -> Tensor:
    """The state as the next stage receives it; its backward pass returns the gradient as the previous stage receives
    it. `sanity` observes both in training. The backward pass of a validation message raises RuntimeError."""
    arrived: Tensor = _InProcessBoundary.apply(state, ids_BW, method, message_id, sanity)  # type: ignore[no-untyped-call]
    return arrived


def single_tensor(output: Any) -> Tensor:
    """The tensor that a module before a boundary has returned, by itself or as the only item of a tuple or list.

    Raises ValueError for any other output.
    """
    items = output if isinstance(output, tuple | list) else (output,)
    if len(items) != 1 or not isinstance(items[0], Tensor):
        kinds = ", ".join(type(item).__name__ for item in items)
        raise ValueError(f"a module before a boundary returned ({kinds}), and one tensor crosses a boundary")
    return items[0]


class _InProcessBoundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        ids_BW: Tensor | None,
        method: BoundaryMethod,
        message_id: MessageId,
        sanity: MessageSanityCheck | None,
    ) -> Tensor:
        ctx.method, ctx.message_id, ctx.sanity = method, message_id, sanity
        arrived = method.decode_state(method.encode_state(state, ids_BW, message_id), ids_BW, message_id)
        if sanity is not None and message_id.training:
            sanity.observe_sent(message_id.boundary, state, forward=True)
            sanity.observe(message_id.boundary, arrived, forward=True)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if not ctx.message_id.training:
            raise RuntimeError(
                "a validation output was differentiated, whose gradient is not that of training: use "
                "CompressedSequential.step"
            )
        arrived = ctx.method.decode_gradient(ctx.method.encode_gradient(gradient, ctx.message_id), ctx.message_id)
        if ctx.sanity is not None:
            ctx.sanity.observe_sent(ctx.message_id.boundary, gradient, forward=False)
            ctx.sanity.observe(ctx.message_id.boundary, arrived, forward=False)
        return arrived, None, None, None, None
