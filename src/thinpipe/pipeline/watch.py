"""Looks at every message of a training step once it is decoded: is it finite, and of a size that was seen before?

What is bad is noted and flows on: all processes stay in step, and tell each other at its end. It costs one norm a
message; what a GPU has found is asked for once a step. Norms are float32, so that numbers above 1e19 count as infinite
even where there is nothing to compare with.
"""

import math

import torch
from torch import Tensor

ABSURD = 1000.0
"""So many times the largest norm of earlier steps at the same boundary in the same direction."""
FIRST_STEPS = 3
"""Good ones, before which there is too little to compare with."""

End = tuple[int, bool]
"""A boundary, and whether it was crossed forward: by states, and not by gradients."""


class Watch:
    """Of all boundaries at which this process receives; those inside of it included."""

    def __init__(self) -> None:
        self._seen: dict[End, list[Tensor]] = {}
        self._found: dict[End, list[float]] = {}
        self._largest: dict[End, float] = {}
        self._good_steps = 0

    def begin(self) -> None:
        """A step begins, or begins again."""
        self._seen, self._found = {}, {}

    def see(self, boundary: int, values: Tensor, *, forward: bool) -> None:
        self._seen.setdefault((boundary, forward), []).append(torch.linalg.vector_norm(values.detach().float()))

    def not_finite(self) -> dict[End, int]:
        """How many messages of the step were not."""
        return {end: sum(not math.isfinite(norm) for norm in norms) for end, norms in self._norms().items()}

    def absurd(self) -> dict[End, int]:
        """How many were finite, and far larger than any before."""
        return {end: self._too_large(end, norms) for end, norms in self._norms().items()}

    def accept(self) -> None:
        """The step was good everywhere: later ones are compared with it too."""
        for end, norms in self._norms().items():
            self._largest[end] = max(self._largest.get(end, 0.0), *norms)
        self._good_steps += 1

    def _too_large(self, end: End, norms: list[float]) -> int:
        largest = self._largest.get(end, 0.0)
        if not largest or self._good_steps < FIRST_STEPS:
            return 0
        return sum(math.isfinite(norm) and norm > ABSURD * largest for norm in norms)

    def _norms(self) -> dict[End, list[float]]:
        if self._seen:
            numbers = iter(torch.stack([norm for norms in self._seen.values() for norm in norms]).tolist())
            self._found = {end: [next(numbers) for _ in norms] for end, norms in self._seen.items()}
            self._seen = {}
        return self._found
