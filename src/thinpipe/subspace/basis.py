"""The orthonormal basis U that all segments of a model share.

A wrong basis leaves every norm unchanged, so it cannot be detected from the values of messages: a basis therefore has a
version and a hash for processes to compare. A random basis is drawn once and then distributed, because torch does not
guarantee the same random numbers on every platform.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thinpipe.core.hashing import array_sha256
from thinpipe.core.seeds import derive_seed


def orthonormalise(matrix_DK: Tensor) -> Tensor:
    """The Q of a QR decomposition with positive diagonal of R: continuous in its argument, and identity for an
    orthonormal matrix. Computed in float64 on the CPU (some devices have no float64), returned in dtype and on device
    of the argument."""
    q_DK, r_KK = torch.linalg.qr(matrix_DK.cpu().double())
    signs_K = torch.where(r_KK.diagonal() < 0, -1.0, 1.0).double()
    orthonormal_DK: Tensor = (q_DK * signs_K).to(matrix_DK.dtype).contiguous()
    return orthonormal_DK.to(matrix_DK.device)  # contiguous: LAPACK returns column-major, transports send raw memory


@dataclass(frozen=True, eq=False)
class Basis:
    """U and its version: 0 for the initial basis, incremented by every Grassmann update."""

    matrix_DK: Tensor
    version: int = 0

    def __post_init__(self) -> None:
        if self.matrix_DK.dim() != 2 or self.matrix_DK.shape[0] < self.matrix_DK.shape[1]:
            raise ValueError(f"a basis is a tall D x K matrix, not {tuple(self.matrix_DK.shape)}")

    @classmethod
    def random(cls, dim: int, width: int, *, seed: int, dtype: torch.dtype = torch.float32) -> "Basis":
        """A basis drawn uniformly on the Grassmann manifold, in float64, then converted to `dtype`."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "basis"))
        gaussian_DK = torch.randn(dim, width, generator=generator, dtype=torch.float64, device="cpu")
        return cls(orthonormalise(gaussian_DK).to(dtype))

    @cached_property
    def hash(self) -> str:
        """sha256 of the matrix. The version is not included: two versions may have the same matrix."""
        return array_sha256(self.matrix_DK.detach().cpu().numpy())

    @property
    def orthonormality_error(self) -> float:
        """max |UᵀU − I|, 0 up to rounding."""
        matrix_DK = self.matrix_DK.cpu().double()
        identity_KK = torch.eye(matrix_DK.shape[1], dtype=torch.float64)
        return float((matrix_DK.T @ matrix_DK - identity_KK).abs().max())
