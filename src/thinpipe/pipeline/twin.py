"""The twin: all segments in one process, with every message encoded and decoded as if it had crossed a network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, Crossing
from thinpipe.pipeline.work import SegmentWork


def run_forward(
    works: Sequence[SegmentWork], method: BoundaryMethod, ids_BW: Tensor, *, seed: int, step: int, microbatch: int
) -> tuple[list[Tensor], list[Tensor], list[Crossing]]:
    """What each segment gave (the last one: the mean loss), what each later one received, and where it crossed."""
    crossings = [
        Crossing(seed=seed, step=step, microbatch=microbatch, boundary=index) for index in range(len(works) - 1)
    ]
    given: list[Tensor] = []
    received: list[Tensor] = []
    ids, state = ids_BW, None
    for work, crossing in zip(works, [None, *crossings], strict=True):
        if crossing is not None:
            ids, state = method.unpack_forward(method.pack_forward(ids, given[-1], crossing), crossing)
            received.append(state.requires_grad_(torch.is_grad_enabled()))
        work.begin(ids, step=step, microbatch=microbatch)
        given.append(work(state))
    return given, received, crossings


def run_microbatch(
    works: Sequence[SegmentWork], method: BoundaryMethod, ids_BW: Tensor, *, seed: int, step: int, microbatch: int
) -> Tensor:
    """Forward and backward through all segments; gradients are added to the parameters'. Returns the mean loss."""
    given, received, crossings = run_forward(works, method, ids_BW, seed=seed, step=step, microbatch=microbatch)
    loss = given.pop()
    loss.backward()
    for out, arrived, crossing in zip(reversed(given), reversed(received), reversed(crossings), strict=True):
        assert arrived.grad is not None
        out.backward(method.unpack_backward(method.pack_backward(arrived.grad, crossing), crossing))
    return loss.detach()
