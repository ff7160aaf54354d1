"""`none` and `subspace`: the state itself crosses, in a number format. Exact in fp32.

They are one method: in a subspace model the state is the K coordinates, in a dense one the D-wide vector. What differs
is that integers of a dense state are taken after a rotation, while coordinates in a random basis need none.
"""

from torch import Tensor

from thinpipe.boundary.contract import BoundaryMethod, Crossing, MessageShape
from thinpipe.boundary.formats import FORMATS, NumberFormat
from thinpipe.boundary.rotation import Rotation
from thinpipe.boundary.settings import BoundarySection


class PlainMethod(BoundaryMethod):
    def __init__(self, shape: MessageShape, settings: BoundarySection, *, rotation: Rotation | None) -> None:
        super().__init__(shape)
        self.forward_format, self.backward_format = FORMATS[settings.forward], FORMATS[settings.backward]
        self.rotation = rotation

    @property
    def state_nbytes(self) -> int:
        return self.shape.rows * self.forward_format.row_nbytes(self.shape.width)

    @property
    def gradient_nbytes(self) -> int:
        return self.shape.rows * self.backward_format.row_nbytes(self.shape.width)

    def encode_state(self, state: Tensor, crossing: Crossing) -> Tensor:  # noqa: ARG002  rounded to nearest
        return self._encode(state, self.forward_format, None)

    def decode_state(self, data: Tensor, crossing: Crossing) -> Tensor:  # noqa: ARG002
        return self._decode(data, self.forward_format)

    def encode_gradient(self, gradient: Tensor, crossing: Crossing) -> Tensor:
        return self._encode(gradient, self.backward_format, crossing)

    def decode_gradient(self, data: Tensor, crossing: Crossing) -> Tensor:  # noqa: ARG002
        return self._decode(data, self.backward_format)

    def _encode(self, values: Tensor, number_format: NumberFormat, crossing: Crossing | None) -> Tensor:
        rows = values.reshape(self.shape.rows, self.shape.width)
        if self.rotation is not None and number_format.wants_rotation:
            rows = self.rotation.apply(rows.float())
        uniform = None if crossing is None else lambda shape: crossing.uniform(shape, "backward")
        return number_format.encode(rows, uniform).flatten()

    def _decode(self, data: Tensor, number_format: NumberFormat) -> Tensor:
        rows = number_format.decode(data.view(self.shape.rows, -1), self.shape.width)
        if self.rotation is not None and number_format.wants_rotation:
            rows = self.rotation.undo(rows)
        return rows.to(self.shape.dtype).view(self.shape.batch, self.shape.tokens, self.shape.width)


def make_none(shape: MessageShape, settings: BoundarySection, seed: int) -> BoundaryMethod:
    return PlainMethod(shape, settings, rotation=Rotation(shape.width, seed))


def make_subspace(shape: MessageShape, settings: BoundarySection, seed: int) -> BoundaryMethod:  # noqa: ARG001
    return PlainMethod(shape, settings, rotation=None)
