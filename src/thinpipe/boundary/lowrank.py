"""Low rank: the states of all tokens of a micro-batch as one matrix, and the best product of two thin ones.

A truncated singular value decomposition for every message: the naive baseline, dear to compute.
"""

import torch
from torch import Tensor

from thinpipe.boundary.contract import Compressor, MessageShape, Passage
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.lengths import LowRankLayout
from thinpipe.boundary.settings import Compression


class LowRank(Compressor):
    def __init__(self, shape: MessageShape, settings: Compression, seed: int) -> None:  # noqa: ARG002
        assert settings.rank is not None
        self.shape, self.rank, self.format = shape, settings.rank, FORMATS[settings.format or "bf16"]
        layout = LowRankLayout(shape, settings)
        self.left_nbytes, self.nbytes = layout.left_nbytes, layout.nbytes

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:  # noqa: ARG002  both factors to nearest
        left_NR, right_RW = truncate(values_BTW.reshape(self.shape.rows, self.shape.width), self.rank)
        return torch.cat((self.format.encode(left_NR).flatten(), self.format.encode(right_RW).flatten()))

    def decode(self, data: Tensor, passage: Passage) -> Tensor:  # noqa: ARG002
        left_NR = self.format.decode(data[: self.left_nbytes].view(self.shape.rows, -1), self.rank)
        right_RW = self.format.decode(data[self.left_nbytes :].view(self.rank, -1), self.shape.width)
        return (left_NR @ right_RW).view(self.shape.batch, self.shape.tokens, self.shape.width)


def truncate(matrix_NW: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The factors of the nearest matrix of this rank. The largest entry of every right vector is positive."""
    if not matrix_NW.isfinite().all():  # which has no decomposition; the step must come to nothing, not to an error
        return matrix_NW.new_full((len(matrix_NW), rank), torch.nan), matrix_NW.new_zeros(rank, matrix_NW.shape[1])
    left_NR, values_R, right_RW = torch.linalg.svd(matrix_NW, full_matrices=False)
    left_NR, values_R, right_RW = left_NR[:, :rank], values_R[:rank], right_RW[:rank]
    signs_R1 = right_RW.gather(1, right_RW.abs().argmax(1, keepdim=True)).sign()
    return left_NR * values_R * signs_R1.T, right_RW * signs_R1
