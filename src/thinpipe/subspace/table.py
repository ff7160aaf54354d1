"""A table of vectors of low rank: a narrow row for each token, and one matrix that makes it D wide."""

from torch import Tensor, nn


class NarrowRows(nn.Embedding):
    """Begins with unit variance: the matrix behind it sets the scale."""


class Widening(nn.Linear):
    """Begins so that widened rows have the standard deviation of an ordinary table's."""


class Table(nn.Module):
    """As an embedding, and with about rank/dim of its numbers."""

    def __init__(self, rows: int, rank: int, dim: int) -> None:
        super().__init__()
        self.rows = NarrowRows(rows, rank)
        self.widen = Widening(rank, dim, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        wide_BTD: Tensor = self.widen(self.rows(ids_BT))
        return wide_BTD.to(self.rows.weight.dtype)  # the stream is not narrower than the weights under autocast
