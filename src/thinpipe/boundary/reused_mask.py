"""Gradients with a reused top-k mask: the gradient is sent only at the positions that top-k selected in the state, so
no positions are sent back.

Both ends keep the mask of a micro-batch from its forward message until its gradient message.
"""

from torch import Tensor

from thinpipe.boundary.contract import (
    BoundaryMethod,
    Compressor,
    DirectionCodec,
    MessageContext,
    MessageId,
    MessageShape,
)
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.sizes import masked_nbytes
from thinpipe.boundary.topk import TopK
from thinpipe.config.boundary import FormatName


class MaskedCompressor(Compressor):
    """Encodes the values at `context.kept_indices`; all other values are decoded as zero."""

    def __init__(self, states: TopK, name: FormatName) -> None:
        self.states, self.format = states, FORMATS[name]
        self.nbytes = masked_nbytes(states.layout, name)

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        assert context.kept_indices is not None
        groups = values_BTW.reshape(self.states.groups, self.states.size)
        return self.format.encode(groups.gather(1, context.kept_indices), context.uniform).flatten()

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:
        assert context.kept_indices is not None
        values = self.format.decode(data.view(self.states.groups, -1), self.states.count)
        return self.states.scatter(values, context.kept_indices)


class ReusedMaskMethod(BoundaryMethod):
    """Boundary codec with top-k states whose masks select the gradient values to send."""

    def __init__(
        self,
        shape: MessageShape,
        states: DirectionCodec,
        gradients: DirectionCodec,
        *,
        at_inference: BoundaryMethod | None = None,
    ) -> None:
        super().__init__(shape, states, gradients, at_inference=at_inference)
        assert isinstance(states.compressor, TopK)
        self.topk = states.compressor
        self.sent: dict[int, Tensor] = {}
        """Masks of sent states whose gradient has not arrived yet, by micro-batch (at the sender)."""
        self.received: dict[int, Tensor] = {}
        """Masks of received states whose gradient has not been sent yet, by micro-batch (at the receiver)."""

    def rollback(self) -> None:
        super().rollback()
        self.sent, self.received = {}, {}

    def encode_state(self, state: Tensor, ids_BW: Tensor | None, message_id: MessageId) -> Tensor:
        data = super().encode_state(state, ids_BW, message_id)
        if message_id.training:
            self.sent[message_id.microbatch] = self.topk.kept_indices(data)
        return data

    def decode_state(self, data: Tensor, ids_BW: Tensor | None, message_id: MessageId) -> Tensor:
        if message_id.training:
            self.received[message_id.microbatch] = self.topk.kept_indices(data)
        return super().decode_state(data, ids_BW, message_id)

    def encode_gradient(self, gradient: Tensor, message_id: MessageId) -> Tensor:
        context = self._backward(message_id, self.received.pop(message_id.microbatch))
        return self.gradients.encode(gradient.float(), context)

    def decode_gradient(self, data: Tensor, message_id: MessageId) -> Tensor:
        context = self._backward(message_id, self.sent.pop(message_id.microbatch))
        return self.gradients.decode(data, context).to(self.shape.dtype)
