"""Low-rank embedding: a narrow table with one row per token id, and one matrix that projects rows to the width D.

With a window of n, the matrix projects the concatenated rows of a token and of the n - 1 tokens before it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NarrowEmbedding(nn.Embedding):
    """The narrow table. Initialised with unit variance: `UpProjection` sets the scale."""


class UpProjection(nn.Linear):
    """The projection to width D. Initialised so that a projected row has the standard deviation of an ordinary
    embedding."""

    def __init__(self, rank: int, window: int, dim: int) -> None:
        super().__init__(rank * window, dim, bias=False)
        self.rank = rank


class FactorizedEmbedding(nn.Module):
    """Drop-in for nn.Embedding with about rank/dim of its parameters."""

    def __init__(self, rows: int, rank: int, dim: int, window: int = 1) -> None:
        super().__init__()
        self.window = window
        self.rows = NarrowEmbedding(rows, rank)
        self.up_project = UpProjection(rank, window, dim)

    def forward(self, ids_BT: Tensor, previous_BP: Tensor | None = None) -> Tensor:
        """`previous_BP`: tokens before `ids_BT`, as many as are known; None at the beginning of a text. Missing tokens
        of the window count as zero rows."""
        all_BS = ids_BT if previous_BP is None or self.window == 1 else torch.cat((previous_BP, ids_BT), dim=1)
        rows_BSR = self.rows(all_BS)
        if self.window > 1:
            length = rows_BSR.shape[1]
            earlier = [F.pad(rows_BSR, (0, 0, by, 0))[:, :length] for by in range(1, self.window)]
            rows_BSR = torch.cat((rows_BSR, *earlier), dim=-1)[:, length - ids_BT.shape[1] :]
        wide_BTD: Tensor = self.up_project(rows_BSR)
        return wide_BTD.to(self.rows.weight.dtype)  # the stream keeps the weights' dtype under autocast
