"""Seeded randomised Hadamard rotation: spreads outliers over all channels of a block, so that integer formats do not
waste their range on them.

Random signs, then a Walsh-Hadamard transform on blocks of the largest power of two that divides the width W:
orthogonal, its own inverse up to the signs, W log2(block) additions per row. If W is a power of two, the block is the
whole row; if W is twice an odd number, a block is two channels and spreads little. States of a subspace are not
rotated: their coordinates refer to a random basis already.
"""

import torch
from torch import Tensor

from thinpipe.core.seeds import derive_seed


class HadamardRotation:
    """Rotation of rows of width W: the same in sender and receiver for equal seeds; `inverse` undoes `apply` up to
    rounding."""

    def __init__(self, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "rotation"))
        self.signs_W = torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1
        self.block = width & -width

    def apply(self, values_NW: Tensor) -> Tensor:
        return self._transform(values_NW * self.signs_W.to(values_NW))

    def inverse(self, values_NW: Tensor) -> Tensor:
        return self._transform(values_NW) * self.signs_W.to(values_NW)

    def _transform(self, values_NW: Tensor) -> Tensor:
        """Symmetric and orthogonal on each block: applied twice it is the identity."""
        shape = values_NW.shape
        blocks = values_NW.reshape(-1, self.block)
        half = 1
        while half < self.block:
            pairs = blocks.view(len(blocks), -1, 2, half)
            left, right = pairs[:, :, 0], pairs[:, :, 1]
            blocks = torch.stack((left + right, left - right), dim=2).view(len(blocks), self.block)
            half *= 2
        turned: Tensor = blocks / self.block**0.5
        return turned.view(shape)
