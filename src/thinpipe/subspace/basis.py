"""The orthonormal basis U that all segments of a model share.

A wrong basis leaves every norm unchanged, so nothing in the numbers gives it away: a basis therefore carries a
version and a hash, and whoever receives a message compares both. A random basis is made once and shipped, because
torch does not promise the same random numbers on every platform.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinpipe.core.digest import array_sha256
from thinpipe.core.seeds import derive_seed


def orthonormalise(matrix_DK: Tensor) -> Tensor:
    """The Q of a QR decomposition with R's diagonal positive: continuous in its argument, and U itself maps to U."""
    q_DK, r_KK = torch.linalg.qr(matrix_DK)
    signs_K = torch.where(r_KK.diagonal() < 0, -1.0, 1.0).to(q_DK.dtype)
    orthonormal_DK: Tensor = q_DK * signs_K
    return orthonormal_DK.contiguous()  # LAPACK's result is column-major, and a network would send its memory as it is


@dataclass(frozen=True, eq=False)
class Basis:
    """U with its version: 0 for the first, one more after every Grassmann step."""

    matrix_DK: Tensor
    version: int = 0

    def __post_init__(self) -> None:
        if self.matrix_DK.dim() != 2 or self.matrix_DK.shape[0] < self.matrix_DK.shape[1]:
            raise ValueError(f"a basis is a tall D x K matrix, not {tuple(self.matrix_DK.shape)}")

    @classmethod
    def random(cls, dim: int, width: int, *, seed: int, dtype: torch.dtype = torch.float32) -> "Basis":
        """Uniform on the Grassmann manifold; drawn and orthonormalised in float64, whatever `dtype` is kept."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "basis"))
        gaussian_DK = torch.randn(dim, width, generator=generator, dtype=torch.float64, device="cpu")
        return cls(orthonormalise(gaussian_DK).to(dtype))

    @cached_property
    def hash(self) -> str:
        """sha256 of the matrix, bit for bit. The version is not in it: two versions may hold the same numbers."""
        return array_sha256(self.matrix_DK.detach().cpu().numpy())

    @property
    def orthonormality_error(self) -> float:
        """max |UᵀU − I|: 0 up to rounding, always."""
        matrix_DK = self.matrix_DK.double()
        identity_KK = torch.eye(matrix_DK.shape[1], dtype=torch.float64, device=matrix_DK.device)
        return float((matrix_DK.T @ matrix_DK - identity_KK).abs().max())
