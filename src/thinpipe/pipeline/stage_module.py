"""Module of a pipeline stage: consecutive segments in one process; with all segments, the twin (reference run).

At boundaries inside the stage no message leaves the process, but states and gradients are still encoded and decoded.
So the placement of segments does not change a bit of the result.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.core.seeds import derive_seed
from thinpipe.models.protocol import PipelineSegment
from thinpipe.pipeline.chat_loss import ChatLoss
from thinpipe.pipeline.in_process_boundary import cross_boundary
from thinpipe.pipeline.sanity import MessageSanityCheck
from thinpipe.subspace import Basis


class StageModule(nn.Module):
    """Maps the state of the previous segment (None for the first) to the state after this stage, or to the mean loss.

    Ids, step and micro-batch are set with `begin`: torch's zero-bubble backward passes require that only tensors with a
    gradient are arguments of `forward`. Ids have W = T + 1 tokens, so that the last segment has its targets.
    """

    def __init__(
        self,
        segments: Sequence[PipelineSegment],
        indices: range,
        methods: Sequence[BoundaryMethod],
        *,
        seed: int,
        sanity: MessageSanityCheck | None = None,
        chat_loss: ChatLoss | None = None,
    ) -> None:
        """`segments` and `methods` are those of the whole model; `methods[b]` encodes the boundary after segment b.

        `indices`: segments of this stage. `sanity` observes all decoded messages in training. `chat_loss`: what ids
        with flags mean; None: they are plain text.
        """
        super().__init__()
        self.segments = [segments[index] for index in indices]
        self._registered = nn.ModuleList(cast(list[nn.Module], self.segments))  # for parameters()
        self.indices, self.methods, self.seed, self.sanity = indices, methods, seed, sanity or MessageSanityCheck()
        self.chat_loss = chat_loss
        self.ids_BW = torch.empty(0, 0, dtype=torch.int64)
        self.step = self.microbatch = 0
        self.backward_follows = True

    def begin(self, ids_BW: Tensor, *, step: int, microbatch: int, backward_follows: bool = True) -> None:
        """Sets the context of the next `forward`; `backward_follows` is False in validation."""
        self.ids_BW, self.step, self.microbatch = ids_BW, step, microbatch
        self.backward_follows = backward_follows

    def method(self, boundary: int, *, training: bool) -> BoundaryMethod:
        """Boundary method for training, or its inference variant."""
        return self.methods[boundary] if training else self.methods[boundary].at_inference

    def message_id(self, boundary: int, *, step: int, microbatch: int, training: bool) -> MessageId:
        return MessageId(seed=self.seed, step=step, microbatch=microbatch, boundary=boundary, training=training)

    def forward(self, state: Tensor | None = None) -> Tensor:
        step, microbatch, training = self.step, self.microbatch, self.backward_follows
        chats, ids_BW = self.chat_loss, self.ids_BW if self.chat_loss is None else self.chat_loss.ids(self.ids_BW)
        position_ids_BT = None if chats is None else chats.position_ids(self.ids_BW[:, :-1])
        for index, segment in zip(self.indices, self.segments, strict=True):
            if index > self.indices.start:
                method = self.method(index - 1, training=training)
                message_id = self.message_id(index - 1, step=step, microbatch=microbatch, training=training)
                assert state is not None
                state = cross_boundary(state, self.ids_BW, method, message_id, self.sanity)
            dropout_seed = derive_seed(self.seed, "dropout", step, microbatch, index)
            state = segment(
                ids_BW[:, :-1],
                state if index else None,
                dropout_seed=dropout_seed,
                targets_BT=ids_BW[:, 1:],
                position_ids_BT=position_ids_BT,
            )
        assert state is not None
        if not self.is_last:
            return state
        return state.mean() if chats is None else chats.mean(state, self.ids_BW[:, 1:])

    @property
    def state_basis(self) -> Basis | None:
        """Basis of the states at the boundaries, the same for all segments; None for states without a basis."""
        return self.segments[0].space.state_basis

    @property
    def is_last(self) -> bool:
        return self.segments[-1].is_last
