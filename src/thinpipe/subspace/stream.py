"""The residual stream as blocks use it: a block reads `dense()` and writes with `add()`.

This hides from blocks whether the stream's state is D or K numbers per token.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """A residual stream. `state` is what a boundary message carries besides the token ids."""

    @property
    def state(self) -> Tensor: ...

    def dense(self) -> Tensor: ...

    def add(self, written: Tensor) -> "Stream": ...


@dataclass(frozen=True, eq=False)
class DenseStream:
    """An ordinary residual stream: the state is the D-wide vector itself."""

    state: Tensor

    def dense(self) -> Tensor:
        return self.state

    def add(self, written_BTD: Tensor) -> "DenseStream":
        return DenseStream(self.state + written_BTD)


@dataclass(frozen=True, eq=False)
class SubspaceStream:
    """A stream in a subspace: `state` has K coordinates per token; `dense() = base + state Uᵀ`, so `dense() − base`
    always lies in span(U)."""

    state: Tensor
    base_BTD: Tensor
    basis_DK: Tensor

    def dense(self) -> Tensor:
        # Autocast would round the whole stream to bfloat16; like a dense residual stream, this one keeps its precision.
        with torch.autocast(self.state.device.type, enabled=False):
            # One fused multiply-add: no D-wide temporary beside the result.
            read_ND = torch.addmm(self.base_BTD.flatten(0, -2), self.state.flatten(0, -2), self.basis_DK.T)
        return read_ND.view(*self.base_BTD.shape)

    def add(self, written_BTK: Tensor) -> "SubspaceStream":
        return SubspaceStream(self.state + written_BTK, self.base_BTD, self.basis_DK)
