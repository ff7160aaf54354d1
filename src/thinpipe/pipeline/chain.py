"""Consecutive segments in one process: what a stage of a pipeline computes, and the twin with all of them.

Inside a chain no message leaves the process, but every boundary is crossed all the same: encoded and decoded, in both
directions. So where the segments are placed changes no bit.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from thinpipe.boundary.contract import BoundaryMethod, Crossing
from thinpipe.core.seeds import derive_seed
from thinpipe.models import Segment
from thinpipe.pipeline.watch import Watch
from thinpipe.subspace import Basis


class Chain(nn.Module):
    """The state of the segment before in (nothing for the first), its last segment's state or the mean loss out.

    Ids, step and micro-batch are set with `begin`: only what has a gradient is an argument, as torch's zero-bubble
    backward passes want it. Ids have W = T + 1 tokens, so that the last segment has its labels.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        indices: range,
        methods: Sequence[BoundaryMethod],
        *,
        seed: int,
        watch: Watch | None = None,
    ) -> None:
        """`segments` and `methods` are those of the whole model; method b carries what crosses from segment b.

        `watch` sees all that arrives in training.
        """
        super().__init__()
        self.segments = nn.ModuleList(segments[index] for index in indices)
        self.indices, self.methods, self.seed, self.watch = indices, methods, seed, watch or Watch()
        self.ids_BW = torch.empty(0, 0, dtype=torch.int64)
        self.step = self.microbatch = 0
        self.backward_follows = True

    def begin(self, ids_BW: Tensor, *, step: int, microbatch: int, backward_follows: bool = True) -> None:
        self.ids_BW, self.step, self.microbatch = ids_BW, step, microbatch
        self.backward_follows = backward_follows

    def method(self, boundary: int, *, training: bool) -> BoundaryMethod:
        """What carries states across it."""
        return self.methods[boundary] if training else self.methods[boundary].at_inference

    def crossing(self, boundary: int, *, step: int, microbatch: int, training: bool) -> Crossing:
        return Crossing(seed=self.seed, step=step, microbatch=microbatch, boundary=boundary, training=training)

    def forward(self, state: Tensor | None = None) -> Tensor:
        step, microbatch, training = self.step, self.microbatch, self.backward_follows
        for index, segment in zip(self.indices, self.segments, strict=True):
            if index > self.indices.start:
                method = self.method(index - 1, training=training)
                crossing = self.crossing(index - 1, step=step, microbatch=microbatch, training=training)
                state = _Cross.apply(state, self.ids_BW, method, crossing, self.watch)  # type: ignore[no-untyped-call]
            _seed(derive_seed(self.seed, "dropout", step, microbatch, index), self.ids_BW.device)
            state = segment(self.ids_BW[:, :-1], state if index else None)
        assert state is not None
        return token_losses(state, self.ids_BW).mean() if self.is_last else state

    @property
    def state_basis(self) -> Basis | None:
        """In which the states at its boundaries are given; the same for all segments of a model."""
        segment = self.segments[0]
        assert isinstance(segment, Segment)
        return segment.space.state_basis

    @property
    def is_last(self) -> bool:
        return self.segments[-1].last is not None


def _seed(seed: int, device: torch.device) -> None:
    """What torch.manual_seed does, without its search for devices that are not there: 370 microseconds a call."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class _Cross(torch.autograd.Function):
    """A boundary inside a process."""

    @staticmethod
    def forward(
        ctx: Any, state: Tensor, ids_BW: Tensor, method: BoundaryMethod, crossing: Crossing, watch: Watch
    ) -> Tensor:
        ctx.method, ctx.crossing, ctx.watch = method, crossing, watch
        arrived = method.decode_state(method.encode_state(state, ids_BW, crossing), ids_BW, crossing)
        if crossing.training:
            watch.see(crossing.boundary, arrived, forward=True)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        arrived = ctx.method.decode_gradient(ctx.method.encode_gradient(gradient, ctx.crossing), ctx.crossing)
        ctx.watch.see(ctx.crossing.boundary, arrived, forward=False)
        return arrived, None, None, None, None


def token_losses(logits_BTV: Tensor, ids_BW: Tensor) -> Tensor:
    """Cross-entropy of every token, in float32 at least."""
    logits = logits_BTV.flatten(0, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, ids_BW[:, 1:].flatten(), reduction="none")
