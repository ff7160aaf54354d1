"""How many directions a matrix has, in two measures that its scale does not change, and a little noise hardly."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Both between 1 and the smaller side of the matrix, which orthogonal rows or columns reach."""

    stable: float
    """‖W‖²_F / ‖W‖²_2: the energy, in units of the largest direction's."""
    effective: float
    """exp of the entropy of the singular values as shares of their sum (Roy and Vetterli 2007)."""


def ranks(matrix: Tensor) -> Ranks:
    """Squares of the singular values are the eigenvalues of the smaller Gram matrix, in float64 exact enough."""
    wide = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    energies = torch.linalg.eigvalsh(wide @ wide.T).clamp(min=0)
    shares = energies.sqrt() / energies.sqrt().sum()
    return Ranks(
        stable=(energies.sum() / energies.max()).item(),
        effective=torch.special.entr(shares).sum().exp().item(),
    )
