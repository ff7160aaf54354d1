"""The residual stream as blocks see it: `dense()` is what a block reads, `add()` takes what it writes.

A block built on these two words does not know whether the stream is D numbers per token or K.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """`state` is everything a boundary has to carry besides the token ids."""

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
    """state holds K coordinates per token; `dense() = base + state Uᵀ`, so `dense() − base` never leaves span(U)."""

    state: Tensor
    base_BTD: Tensor
    basis_DK: Tensor

    def dense(self) -> Tensor:
        # Autocast would round the whole stream to bfloat16; a dense residual stream keeps its precision, so does this.
        with torch.autocast(self.state.device.type, enabled=False):
            # One fused multiply-add: no D-wide temporary beside the result.
            read_ND = torch.addmm(self.base_BTD.flatten(0, -2), self.state.flatten(0, -2), self.basis_DK.T)
        return read_ND.view(*self.base_BTD.shape)

    def add(self, written_BTK: Tensor) -> "SubspaceStream":
        return SubspaceStream(self.state + written_BTK, self.base_BTD, self.basis_DK)
