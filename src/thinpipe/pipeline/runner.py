"""The contract of what computes gradients and a loss with a process's segments, and the twin, which has all of them.

Gradients are summed over micro-batches in order and divided once, whoever runs them.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.pipeline.chain import Chain


@dataclass(frozen=True)
class Received:
    """What came over one boundary in one direction in one step."""

    boundary: int
    forward: bool
    nbytes: int
    waited_seconds: float


class Runner(Protocol):
    """`microbatches` of ids reach the first segment; the mean loss comes out where the last one is, else None."""

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float | None: ...

    def loss(self, microbatches: Sequence[Tensor]) -> float | None:
        """Forward only."""
        ...

    def received(self) -> list[Received]:
        """In the last step."""
        ...

    @property
    def seconds(self) -> float:
        """That the last step took, waiting included."""
        ...


class TwinRunner:
    """All segments here."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.seconds = 0.0

    def gradients(self, step: int, microbatches: Sequence[Tensor]) -> float:
        started = time.monotonic()
        loss = self._run(step, microbatches, backward=True)
        divide_gradients([self.chain], len(microbatches))
        self.seconds = time.monotonic() - started
        return loss

    @torch.no_grad()
    def loss(self, microbatches: Sequence[Tensor]) -> float:
        return self._run(0, microbatches, backward=False)

    def _run(self, step: int, microbatches: Sequence[Tensor], *, backward: bool) -> float:
        total = torch.zeros((), dtype=torch.float64, device=microbatches[0].device)
        for index, ids_BW in enumerate(microbatches):
            self.chain.begin(ids_BW, step=step, microbatch=index, backward_follows=backward)
            loss = self.chain()
            if backward:
                loss.backward()
            total += loss.detach()
        return (total / len(microbatches)).item()

    def received(self) -> list[Received]:
        return []


def divide_gradients(chains: Sequence[Chain], microbatches: int) -> None:
    gradients = [p.grad for chain in chains for p in chain.parameters() if p.grad is not None]
    if microbatches > 1:
        torch._foreach_div_(gradients, float(microbatches))
