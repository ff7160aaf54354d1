"""Low-rank compressor: sends the factors of a truncated SVD of the [tokens, width] matrix of a micro-batch.

One SVD per message: the naive baseline, expensive to compute.
"""

import torch
from torch import Tensor

from thinpipe.boundary.contract import Compressor, MessageContext, MessageShape
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.sizes import LowRankLayout
from thinpipe.config.boundary import CompressionConfig


class LowRank(Compressor):
    def __init__(self, shape: MessageShape, settings: CompressionConfig, seed: int) -> None:  # noqa: ARG002
        assert settings.rank is not None
        self.shape, self.rank, self.format = shape, settings.rank, FORMATS[settings.format or "bf16"]
        layout = LowRankLayout(shape, settings)
        self.left_nbytes, self.nbytes = layout.left_nbytes, layout.nbytes

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:  # noqa: ARG002  both factors to nearest
        left_NR, right_RW = truncate(values_BTW.reshape(self.shape.rows, self.shape.width), self.rank)
        return torch.cat((self.format.encode(left_NR).flatten(), self.format.encode(right_RW).flatten()))

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:  # noqa: ARG002
        left_NR = self.format.decode(data[: self.left_nbytes].view(self.shape.rows, -1), self.rank)
        right_RW = self.format.decode(data[self.left_nbytes :].view(self.rank, -1), self.shape.width)
        return (left_NR @ right_RW).view(self.shape.batch, self.shape.tokens, self.shape.width)


def truncate(matrix_NW: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Factors of the best approximation of this rank. The sign is fixed: the largest entry of each right singular
    vector is positive. A non-finite matrix gives NaN factors."""
    if not matrix_NW.isfinite().all():  # the SVD would raise; NaN makes the step be skipped instead
        return matrix_NW.new_full((len(matrix_NW), rank), torch.nan), matrix_NW.new_zeros(rank, matrix_NW.shape[1])
    left_NR, values_R, right_RW = torch.linalg.svd(matrix_NW, full_matrices=False)
    left_NR, values_R, right_RW = left_NR[:, :rank], values_R[:rank], right_RW[:rank]
    signs_R1 = right_RW.gather(1, right_RW.abs().argmax(1, keepdim=True)).sign()
    return left_NR * values_R * signs_R1.T, right_RW * signs_R1
