"""A table of vectors of low rank: a narrow row for each token, and one matrix that makes D wide what it is given.

With a reach of n the matrix is given the rows of a token and of the n - 1 before it, side by side.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NarrowRows(nn.Embedding):
    """Begins with unit variance: the matrix behind it sets the scale."""


class Widening(nn.Linear):
    """Begins so that what it makes of one row has the standard deviation of an ordinary table's."""

    def __init__(self, rank: int, reach: int, dim: int) -> None:
        super().__init__(rank * reach, dim, bias=False)
        self.rank = rank


class Table(nn.Module):
    """As an embedding, and with about rank/dim of its numbers."""

    def __init__(self, rows: int, rank: int, dim: int, reach: int = 1) -> None:
        super().__init__()
        self.reach = reach
        self.rows = NarrowRows(rows, rank)
        self.widen = Widening(rank, reach, dim)

    def forward(self, ids_BT: Tensor, before_BP: Tensor | None = None) -> Tensor:
        """`before_BP`: the tokens before these, as many as are known; where there are none a text begins."""
        all_BS = ids_BT if before_BP is None or self.reach == 1 else torch.cat((before_BP, ids_BT), dim=1)
        rows_BSR = self.rows(all_BS)
        if self.reach > 1:
            length = rows_BSR.shape[1]
            earlier = [F.pad(rows_BSR, (0, 0, by, 0))[:, :length] for by in range(1, self.reach)]
            rows_BSR = torch.cat((rows_BSR, *earlier), dim=-1)[:, length - ids_BT.shape[1] :]
        wide_BTD: Tensor = self.widen(rows_BSR)
        return wide_BTD.to(self.rows.weight.dtype)  # the stream is not narrower than the weights under autocast
