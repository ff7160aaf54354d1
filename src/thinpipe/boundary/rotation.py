"""A seeded orthogonal rotation that spreads a few large entries over their block, so that integers waste no range.

Random signs, then a Walsh-Hadamard transform on blocks of the largest power of two that divides the width: orthogonal,
its own inverse up to the signs, and W log W additions a row. A block is the row if W is a power of two, and a pair if W
is twice an odd number. A basis that is already random needs none.
"""

import torch
from torch import Tensor

from thinpipe.core.seeds import derive_seed


class Rotation:
    def __init__(self, width: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, "rotation"))
        self.signs_W = torch.randint(0, 2, (width,), generator=generator).float() * 2 - 1
        self.block = width & -width

    def apply(self, values_NW: Tensor) -> Tensor:
        return self._transform(values_NW * self.signs_W.to(values_NW))

    def undo(self, values_NW: Tensor) -> Tensor:
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
