"""Spaces of a model's residual stream: all of R^D, or base + span(U).

A space makes the layers that write to the stream (residual writers, embeddings), and makes a segment's input stream
from a boundary message: token ids and state. Blocks get their writers from a space and so do not choose their width.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from thinpipe.subspace.basis import Basis
from thinpipe.subspace.factorized_embedding import FactorizedEmbedding
from thinpipe.subspace.fixed_tables import FixedTable
from thinpipe.subspace.parameter_tags import mark_coordinates
from thinpipe.subspace.stream import DenseStream, Stream, SubspaceStream

OnGradient = Callable[[Tensor], None]


class ResidualWriter(nn.Linear):
    """A linear layer whose output is added to the residual stream; its output has the width of the stream's state."""


class Space(Protocol):
    """Interface of a space, as blocks and segments use it."""

    @property
    def width(self) -> int:
        """Numbers per token in the state of the stream."""
        ...

    def residual_writer(self, in_features: int, *, bias: bool = False) -> ResidualWriter: ...

    def embedding(self, rows: int) -> nn.Embedding | FactorizedEmbedding: ...

    def open(self, ids_BT: Tensor, state: Tensor, on_gradient: OnGradient | None = None, start: int = 0) -> Stream:
        """The input stream of a segment. In the backward pass, `on_gradient` is called with the D-wide gradient of this
        stream. `start` is the position of the first token."""
        ...


class DenseSpace(nn.Module):
    """All of R^D: the state is the D-wide vector. `embedding_rank`: rank of token embeddings; 0: full rank."""

    def __init__(self, dim: int, embedding_rank: int = 0) -> None:
        super().__init__()
        self.width, self.embedding_rank = dim, embedding_rank

    @property
    def state_basis(self) -> Basis | None:
        """Basis of the coordinates in boundary messages; None if messages carry the D-wide vector."""
        return None

    @property
    def hashes(self) -> dict[str, str]:
        return {}

    def residual_writer(self, in_features: int, *, bias: bool = False) -> ResidualWriter:
        return ResidualWriter(in_features, self.width, bias=bias)

    def embedding(self, rows: int) -> nn.Embedding | FactorizedEmbedding:
        return (
            FactorizedEmbedding(rows, self.embedding_rank, self.width)
            if self.embedding_rank
            else nn.Embedding(rows, self.width)
        )

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
        """Draws the initial basis from the seed; a joining peer then replaces it by the run's current basis."""
        self.basis = Basis.random(self.dim, self.width, seed=self.seed, dtype=self.basis_DK.dtype)

    @property
    def basis(self) -> Basis:
        """A copy of the current basis, unaffected by later updates."""
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
        """Hashes of basis and frozen tables, which must be equal in all processes of a run. A wrong basis or table
        would not show in any norm."""
        tables = {"token table": self.tokens, "position table": self.positions}
        return {"basis": self.basis.hash} | {name: table.hash for name, table in tables.items() if table is not None}

    def residual_writer(self, in_features: int, *, bias: bool = False) -> ResidualWriter:
        layer = ResidualWriter(in_features, self.width, bias=bias)
        for parameter in layer.parameters():
            mark_coordinates(parameter, axis=0, full_width=self.dim)
        return layer

    def embedding(self, rows: int) -> nn.Embedding:
        layer = nn.Embedding(rows, self.width)
        mark_coordinates(layer.weight, axis=1, full_width=self.dim)
        return layer

    def base(self, ids_BT: Tensor, dtype: torch.dtype, start: int = 0) -> Tensor:
        """The D-wide part of the residual stream that every segment computes from token ids and positions alone."""
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
            # Layers read base + state Uᵀ, so the gradient of base is the full D-wide gradient of the stream, including
            # its part outside span(U).
            base_BTD = _Observed.apply(base_BTD, state, on_gradient)  # type: ignore[no-untyped-call]
        return SubspaceStream(state, base_BTD, self.basis_DK.to(state.dtype))


class _Observed(torch.autograd.Function):
    """Identity on `base` that passes its gradient to `on_gradient`.

    `state` is an unused argument: it places this node between the segment's input and output in the autograd graph, so
    that a backward pass for inputs only (zero-bubble schedules) visits it. It would not call a hook on a leaf.
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
    """Space of the segment after the last boundary with `free_last`: receives coordinates, writes to all of R^D."""

    def __init__(self, subspace: Subspace) -> None:
        super().__init__(subspace.dim)
        self.subspace = subspace

    @property
    def state_basis(self) -> Basis | None:
        return self.subspace.state_basis

    def open(self, ids_BT: Tensor, state: Tensor, on_gradient: OnGradient | None = None, start: int = 0) -> Stream:
        return DenseStream(self.subspace.open(ids_BT, state, on_gradient, start).dense())
