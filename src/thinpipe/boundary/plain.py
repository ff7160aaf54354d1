"""`none` and `subspace`: the state itself crosses, in a number format. Exact in fp32.

They are one method: in a subspace model the state is the K coordinates, in a dense one the D-wide vector. What differs
is that integers of a dense state are taken after a rotation, while coordinates in a random basis need none.
"""

from torch import Tensor

from thinpipe.boundary.contract import Compressor, MessageShape, Passage
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.lengths import PlainLayout
from thinpipe.boundary.rotation import Rotation
from thinpipe.boundary.settings import FormatName


class Plain(Compressor):
    """Every number, token by token."""

    def __init__(self, shape: MessageShape, name: FormatName, rotation: Rotation | None) -> None:
        self.shape, self.format = shape, FORMATS[name]
        self.rotation = rotation if self.format.wants_rotation else None
        self.nbytes = PlainLayout(shape, name).nbytes

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        rows = values_BTW.reshape(self.shape.rows, self.shape.width)
        if self.rotation is not None:
            rows = self.rotation.apply(rows)
        return self.format.encode(rows, passage.uniform).flatten()

    def decode(self, data: Tensor, passage: Passage) -> Tensor:  # noqa: ARG002
        rows = self.format.decode(data.view(self.shape.rows, -1), self.shape.width)
        if self.rotation is not None:
            rows = self.rotation.undo(rows)
        return rows.view(self.shape.batch, self.shape.tokens, self.shape.width)


def make_none(shape: MessageShape, name: FormatName, seed: int) -> Compressor:
    return Plain(shape, name, Rotation(shape.width, seed))


def make_subspace(shape: MessageShape, name: FormatName, seed: int) -> Compressor:  # noqa: ARG001
    return Plain(shape, name, None)
