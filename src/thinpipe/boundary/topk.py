"""Top-k: the largest numbers of a sample, or of each token, and where they stood. All others come back as zero.

arXiv 2401.07788 takes the largest of a sample's flattened state. Positions are packed integers, or one bit for every
number where that is shorter (from about 1 in 16 kept); their length is known beforehand either way.
"""

import torch
from torch import Tensor

from thinpipe.boundary.bits import pack_bits, unpack_bits
from thinpipe.boundary.contract import Compressor, MessageShape, Passage
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.lengths import TopKLayout
from thinpipe.boundary.settings import Compression


class TopK(Compressor):
    def __init__(self, shape: MessageShape, settings: Compression, seed: int) -> None:  # noqa: ARG002
        assert settings.keep is not None
        self.shape, self.format = shape, FORMATS[settings.format or "bf16"]
        self.layout = layout = TopKLayout(shape, settings)
        self.groups, self.size, self.count = layout.groups, layout.group, layout.count
        self.position_bits, self.as_bitmap = layout.position_bits, layout.as_bitmap
        self.values_nbytes, self.nbytes = layout.values_nbytes, layout.nbytes

    def encode(self, values_BTW: Tensor, passage: Passage) -> Tensor:
        groups = values_BTW.reshape(self.groups, self.size)
        kept = groups.abs().topk(self.count, dim=1, sorted=False).indices.sort(dim=1).values
        values = self.format.encode(groups.gather(1, kept), passage.uniform)
        if self.as_bitmap:
            bitmap = torch.zeros(groups.shape, dtype=torch.uint8, device=groups.device)
            positions = pack_bits(bitmap.scatter_(1, kept, 1), 1)
        else:
            positions = pack_bits(kept, self.position_bits)
        return torch.cat((values.flatten(), positions.flatten()))

    def decode(self, data: Tensor, passage: Passage) -> Tensor:  # noqa: ARG002
        values = self.format.decode(data[: self.values_nbytes].view(self.groups, -1), self.count)
        return self.spread(values, self.kept(data))

    def kept(self, data: Tensor) -> Tensor:
        """Where the numbers of an encoded message stand, [groups, count]."""
        packed = data[self.values_nbytes :].view(self.groups, -1)
        if not self.as_bitmap:
            return unpack_bits(packed, self.count, self.position_bits).clamp_(max=self.size - 1)
        ones = unpack_bits(packed, self.size, 1).nonzero()[:, 1]
        if len(ones) != self.groups * self.count:
            raise ValueError(f"a message with {len(ones)} positions for {self.groups * self.count} numbers")
        return ones.view(self.groups, self.count)

    def spread(self, values: Tensor, kept: Tensor) -> Tensor:
        """To their places among zeros."""
        zeros = torch.zeros(self.groups, self.size, device=values.device)
        return zeros.scatter_(1, kept, values).view(self.shape.batch, self.shape.tokens, self.shape.width)
