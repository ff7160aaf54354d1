"""Top-k compressor: sends the values of largest magnitude of a sample, or of each token, and their positions. All other
values are decoded as zero.

arXiv 2401.07788 selects among a sample's flattened state. Positions are bit-packed indices, or a bitmap where that is
shorter (from about 1 in 16 selected); both lengths are known in advance.
"""

import torch
from torch import Tensor

from thinpipe.boundary.contract import Compressor, MessageContext, MessageShape
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.packing import pack_bits, unpack_bits
from thinpipe.boundary.sizes import TopKLayout
from thinpipe.config.boundary import CompressionConfig


class TopK(Compressor):
    def __init__(self, shape: MessageShape, settings: CompressionConfig, seed: int) -> None:  # noqa: ARG002
        assert settings.keep is not None
        self.shape, self.format = shape, FORMATS[settings.format or "bf16"]
        self.layout = layout = TopKLayout(shape, settings)
        self.groups, self.size, self.count = layout.groups, layout.group, layout.count
        self.position_bits, self.as_bitmap = layout.position_bits, layout.as_bitmap
        self.values_nbytes, self.nbytes = layout.values_nbytes, layout.nbytes

    def encode(self, values_BTW: Tensor, context: MessageContext) -> Tensor:
        groups = values_BTW.reshape(self.groups, self.size)
        kept_indices = groups.abs().topk(self.count, dim=1, sorted=False).indices.sort(dim=1).values
        values = self.format.encode(groups.gather(1, kept_indices), context.uniform)
        if self.as_bitmap:
            bitmap = torch.zeros(groups.shape, dtype=torch.uint8, device=groups.device)
            positions = pack_bits(bitmap.scatter_(1, kept_indices, 1), 1)
        else:
            positions = pack_bits(kept_indices, self.position_bits)
        return torch.cat((values.flatten(), positions.flatten()))

    def decode(self, data: Tensor, context: MessageContext) -> Tensor:  # noqa: ARG002
        values = self.format.decode(data[: self.values_nbytes].view(self.groups, -1), self.count)
        return self.scatter(values, self.kept_indices(data))

    def kept_indices(self, data: Tensor) -> Tensor:
        """Positions of the selected values of an encoded message, [groups, count].

        Raises ValueError if a bitmap does not have the expected number of bits set.
        """
        packed = data[self.values_nbytes :].view(self.groups, -1)
        if not self.as_bitmap:
            return unpack_bits(packed, self.count, self.position_bits).clamp_(max=self.size - 1)
        ones = unpack_bits(packed, self.size, 1).nonzero()[:, 1]
        if len(ones) != self.groups * self.count:
            raise ValueError(f"a message with {len(ones)} positions for {self.groups * self.count} numbers")
        return ones.view(self.groups, self.count)

    def scatter(self, values: Tensor, kept_indices: Tensor) -> Tensor:
        """A [B, T, W] tensor with `values` at `kept_indices` and zeros elsewhere."""
        zeros = torch.zeros(self.groups, self.size, dtype=values.dtype, device=values.device)
        return zeros.scatter_(1, kept_indices, values).view(self.shape.batch, self.shape.tokens, self.shape.width)
