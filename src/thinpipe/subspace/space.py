"""Where a model's residual stream lives: the whole of R^D, or base + span(U).

A space makes the layers that touch the stream (writers, embeddings) and opens a stream from the message that crosses
a boundary: the token ids and the state. Blocks are built by asking a space for writers, and so never choose a width.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinpipe.subspace.basis import Basis
from thinpipe.subspace.coordinates import mark_coordinates
from thinpipe.subspace.fixed import FixedTable
from thinpipe.subspace.stream import DenseStream, Stream, SubspaceStream
from thinpipe.subspace.table import Table

OnGradient = Callable[[Tensor], None]


class Writer(nn.Linear):
    """A linear layer whose output is added to the residual stream; as wide as the state of the stream."""


class Space(Protocol):
    """What blocks and segments need to know of the residual stream."""

    @property
    def width(self) -> int:
        """Numbers per token in the state of the stream."""
        ...

    def writer(self, in_features: int, *, bias: bool = False) -> Writer: ...

    def embedding(self, rows: int) -> nn.Embedding | Table: ...

    def open(self, ids_BT: Tensor, state: Tensor, on_gradient: OnGradient | None = None, start: int = 0) -> Stream:
        """The stream that a segment starts from; `on_gradient` is called with the D-wide gradient at this point.

        `start` is the position of the first of these tokens.
        """
        ...


class DenseSpace(nn.Module):
    """No constraint: the state is the D-wide vector. `table_rank`: of its embeddings; 0: full."""

    def __init__(self, dim: int, table_rank: int = 0) -> None:
        super().__init__()
        self.width, self.table_rank = dim, table_rank

    @property
    def state_basis(self) -> Basis | None:
        """In which the state that a boundary carries is given; None: it is the whole vector."""
        return None

    @property
    def hashes(self) -> dict[str, str]:
        return {}

    def writer(self, in_features: int, *, bias: bool = False) -> Writer:
        return Writer(in_features, self.width, bias=bias)

    def embedding(self, rows: int) -> nn.Embedding | Table:
        return Table(rows, self.table_rank, self.width) if self.table_rank else nn.Embedding(rows, self.width)

    def open(
        self,
        ids_BT: Tensor,  # noqa: ARG002
        state: Tensor,
        on_gradient: OnGradient | None = None,
        start: int = 0,  # noqa: ARG002
    ) -> Stream:
        if on_gradient is not None and state.requires_grad:
            state.register_hook(on_gradient)
        return DenseStream(state)


class Subspace(nn.Module):
    """base(ids) + span(U), with base = T_fixed[ids] (+ P_fixed[positions] for models with a position table)."""

    def __init__(
        self, dim: int, width: int, *, seed: int, tokens: FixedTable, positions: FixedTable | None = None
    ) -> None:
        super().__init__()
        self.dim, self.width, self.seed, self.version = dim, width, seed, 0
        self.tokens = tokens
        self.positions = positions
        self.basis_DK: Tensor
        self.register_buffer("basis_DK", torch.empty(dim, width))
        if not self.basis_DK.is_meta:
            self.fill()

    def fill(self) -> None:
        """Draws the first basis from the seed; a joining peer then sets the one it is sent."""
        self.basis = Basis.random(self.dim, self.width, seed=self.seed, dtype=self.basis_DK.dtype)

    @property
    def basis(self) -> Basis:
        """A copy that stays what it is when the space moves on to another basis."""
        return Basis(self.basis_DK.clone(), self.version)

    @basis.setter
    def basis(self, basis: Basis) -> None:
        self.basis_DK.copy_(basis.matrix_DK)
        self.version = basis.version

    @property
    def state_basis(self) -> Basis | None:
        return self.basis

    @property
    def hashes(self) -> dict[str, str]:
        """Of what all processes of a run must have alike. A wrong basis or table leaves every norm as it was."""
        tables = {"token table": self.tokens, "position table": self.positions}
        return {"basis": self.basis.hash} | {name: table.hash for name, table in tables.items() if table is not None}

    def writer(self, in_features: int, *, bias: bool = False) -> Writer:
        layer = Writer(in_features, self.width, bias=bias)
        for parameter in layer.parameters():
            mark_coordinates(parameter, axis=0, full_width=self.dim)
        return layer

    def embedding(self, rows: int) -> nn.Embedding:
        layer = nn.Embedding(rows, self.width)
        mark_coordinates(layer.weight, axis=1, full_width=self.dim)
        return layer

    def base(self, ids_BT: Tensor, dtype: torch.dtype, start: int = 0) -> Tensor:
        """The part of the residual stream that every segment computes from the token ids by itself."""
        base_BTD: Tensor = self.tokens(ids_BT, dtype)
        if self.positions is not None:
            positions_T = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)
            base_BTD = base_BTD + self.positions(positions_T, dtype)
        return base_BTD

    def open(
        self, ids_BT: Tensor, state: Tensor, on_gradient: OnGradient | None = None, start: int = 0
    ) -> SubspaceStream:
        base_BTD = self.base(ids_BT, state.dtype, start)
        if on_gradient is not None and torch.is_grad_enabled():
            # Every D-wide read after this point is base + state Uᵀ, so the gradient of base is the whole D-wide
            # gradient here, including what lies outside span(U).
            base_BTD = _Observed.apply(base_BTD, state, on_gradient)  # type: ignore[no-untyped-call]
        return SubspaceStream(state, base_BTD, self.basis_DK.to(state.dtype))


class _Observed(torch.autograd.Function):
    """`base` unchanged; its gradient is shown to the observer.

    `state` is an argument although it is not used: it makes this a node between the segment's input and its output,
    which a backward pass for inputs alone (zero-bubble schedules) visits too. A hook on a leaf it would not call.
    """

    @staticmethod
    def forward(ctx: Any, base_BTD: Tensor, state: Tensor, on_gradient: OnGradient) -> Tensor:  # noqa: ARG004
        ctx.on_gradient = on_gradient
        return base_BTD.view_as(base_BTD)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> tuple[None, None, None]:
        ctx.on_gradient(gradient_BTD)
        return None, None, None


class FreeSpace(DenseSpace):
    """The space after the last boundary: it receives coordinates and then writes to all of R^D."""

    def __init__(self, subspace: Subspace) -> None:
        super().__init__(subspace.dim)
        self.subspace = subspace

    @property
    def state_basis(self) -> Basis | None:
        return self.subspace.state_basis

    def open(self, ids_BT: Tensor, state: Tensor, on_gradient: OnGradient | None = None, start: int = 0) -> Stream:
        return DenseStream(self.subspace.open(ids_BT, state, on_gradient, start).dense())
