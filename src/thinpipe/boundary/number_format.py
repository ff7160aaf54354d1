"""Compressor of the methods `none` and `subspace`: sends all values in a number format. Lossless in fp32.

The methods differ in the state (the D-wide vector of a dense model, or K subspace coordinates) and in one detail: a
dense state is rotated before int4 quantisation, while coordinates in a random basis need no rotation.
"""

from torch import Tensor

from thinpipe.boundary.contract import Compressor, MessageContext, MessageShape
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.rotation import HadamardRotation
from thinpipe.boundary.sizes import NumberFormatLayout
from thinpipe.config.boundary import FormatName


class NumberFormatCompressor(Compressor):
    """All values in a number format, one row per token. `rotation` is used only if the format wants one."""

    def __init__(self, shape: MessageShape, name: FormatName, rotation: HadamardRotation | None) -> None:
        self.shape, self.format = shape, FORMATS[name]
        self.rotation = rotation if self.format.wants_rotation else None
        self.nbytes = NumberFormatLayout(shape, name).nbytes

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        rows = values_BTW.reshape(self.shape.rows, self.shape.width)
        if self.rotation is not None:
            rows = self.rotation.apply(rows)
        return self.format.encode(rows, context.uniform).flatten()

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:  # noqa: ARG002
        rows = self.format.decode(data.view(self.shape.rows, -1), self.shape.width)
        if self.rotation is not None:
            rows = self.rotation.inverse(rows)
        return rows.view(self.shape.batch, self.shape.tokens, self.shape.width)


def make_dense_compressor(shape: MessageShape, name: FormatName, seed: int) -> Compressor:
    return NumberFormatCompressor(shape, name, HadamardRotation(shape.width, seed))


def make_subspace_compressor(shape: MessageShape, name: FormatName, seed: int) -> Compressor:  # noqa: ARG001
    return NumberFormatCompressor(shape, name, None)
