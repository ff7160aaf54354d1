"""The gradient crosses at the numbers that top-k kept of its state, and nowhere else: no positions travel back.

Both ends remember the mask of a micro-batch from its forward message until its gradient has crossed.
"""

from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, Compressor, Crossing, Leg, MessageShape, Passage
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.lengths import masked_nbytes
from thinpipe.boundary.settings import FormatName
from thinpipe.boundary.topk import TopK


class Masked(Compressor):
    """Values where the passage says that they are kept."""

    def __init__(self, states: TopK, name: FormatName) -> None:
        self.states, self.format = states, FORMATS[name]
        self.nbytes = masked_nbytes(states.layout, name)

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        assert passage.kept is not None
        groups = values_BTW.reshape(self.states.groups, self.states.size)
        return self.format.encode(groups.gather(1, passage.kept), passage.uniform).flatten()

    def decode(self, data: Tensor, passage: Passage) -> Tensor:
        assert passage.kept is not None
        values = self.format.decode(data.view(self.states.groups, -1), self.states.count)
        return self.states.spread(values, passage.kept)


class MaskedMethod(BoundaryMethod):
    def __init__(
        self, shape: MessageShape, states: Leg, gradients: Leg, *, at_inference: BoundaryMethod | None = None
    ) -> None:
        super().__init__(shape, states, gradients, at_inference=at_inference)
        assert isinstance(states.compressor, TopK)
        self.topk = states.compressor
        self.sent: dict[int, Tensor] = {}
        """The masks that the sender remembers, by micro-batch."""
        self.received: dict[int, Tensor] = {}

    def go_back(self) -> None:
        super().go_back()
        self.sent, self.received = {}, {}

    def encode_state(self, state: Tensor, ids_BW: Tensor, crossing: Crossing) -> Tensor:
        data = super().encode_state(state, ids_BW, crossing)
        if crossing.training:
            self.sent[crossing.microbatch] = self.topk.kept(data)
        return data

    def decode_state(self, data: Tensor, ids_BW: Tensor, crossing: Crossing) -> Tensor:
        if crossing.training:
            self.received[crossing.microbatch] = self.topk.kept(data)
        return super().decode_state(data, ids_BW, crossing)

    def encode_gradient(self, gradient: Tensor, crossing: Crossing) -> Tensor:
        passage = self._backward(crossing, self.received.pop(crossing.microbatch))
        return self.gradients.encode(gradient.float(), passage)

    def decode_gradient(self, data: Tensor, crossing: Crossing) -> Tensor:
        passage = self._backward(crossing, self.sent.pop(crossing.microbatch))
        return self.gradients.decode(data, passage).to(self.shape.dtype)
