"""Stage of a language model in a pipeline: its forward messages hold a state and token ids, or the flags of chats alone
where segments need no ids.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, MessageId
from thinpipe.pipeline.label_link import LabelLink
from thinpipe.pipeline.stage import EncodedStage
from thinpipe.pipeline.stage_module import StageModule
from thinpipe.transport.labels import Label, is_labelled


class MessageStage(EncodedStage):
    """Stage of a language model. Input: token ids (first stage) or a state. Output: a state, or the mean loss (last
    stage)."""

    def __init__(
        self,
        stage_module: StageModule,
        index: int,
        count: int,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
        labels: LabelLink | None = None,
    ) -> None:
        """`labels`: how the last stage gets them if no token ids cross the boundaries."""
        shape = stage_module.methods[0].shape
        ids = torch.zeros(shape.batch, shape.tokens + 1, dtype=torch.int64, device=device)
        state = torch.zeros(shape.batch, shape.tokens, shape.width, dtype=shape.dtype, device=device)
        state.requires_grad_()
        loss = torch.zeros((), dtype=torch.float32, device=device).requires_grad_()
        super().__init__(
            stage_module,
            index,
            count,
            input_args=ids if index == 0 else state,
            output_args=loss if index == count - 1 else state,
            before=stage_module.indices.start - 1,
            after=stage_module.indices.stop - 1,
            device=device,
            group=group,
        )
        self.stage_module, self.step, self.training, self.labels = stage_module, 0, True, labels
        self.ids: dict[int, Tensor] = {}
        """Token ids by micro-batch; 0 in stages that get none."""

    def begin(self, step: int, microbatches: int, *, backward: bool) -> None:
        """Starts a step (or validation, with `backward` False) and posts its receives."""
        self.step, self.training, self.label = step, backward, self._label(step)
        self.expect_messages(microbatches, backward=backward)

    @property
    def state_nbytes(self) -> int:
        return self._method_before.forward_nbytes

    @property
    def gradient_nbytes(self) -> int:
        return self._method_after.backward_nbytes

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

    def before_forward(self, microbatch: int, args: tuple[Any, ...]) -> None:
        if self.is_first:
            (self.ids[microbatch],) = args
            if self.labels is not None:
                self.labels.give(self.ids[microbatch], microbatch)
        elif self.is_last and self.labels is not None:
            self.ids[microbatch] = self.labels.complete(self.ids[microbatch], microbatch)
        self.stage_module.begin(
            self.ids[microbatch], step=self.step, microbatch=microbatch, backward_follows=self.training
        )

    def encode_state(self, state: Tensor, microbatch: int) -> Tensor:
        if self.training:
            self.stage_module.sanity.observe_sent(self.after, state, forward=True)
        return self._method_after.pack_forward(self.ids[microbatch], state, self._message_id(self.after, microbatch))

    def decode_state(self, message: Tensor, microbatch: int) -> Tensor:
        message_id = self._message_id(self.before, microbatch)
        self.ids[microbatch], state = self._method_before.unpack_forward(message, message_id)
        if self.training:
            self.stage_module.sanity.observe(self.before, state, forward=True)
        return state

    def encode_gradient(self, gradient: Tensor | None, microbatch: int) -> Tensor:
        assert gradient is not None
        self.stage_module.sanity.observe_sent(self.before, gradient, forward=False)
        return self._method_before.pack_backward(gradient, self._message_id(self.before, microbatch))

    def decode_gradient(self, message: Tensor, microbatch: int) -> Tensor:
        gradient = self._method_after.unpack_backward(message, self._message_id(self.after, microbatch))
        self.stage_module.sanity.observe(self.after, gradient, forward=False)
        return gradient
