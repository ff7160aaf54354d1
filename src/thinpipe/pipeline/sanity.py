"""Sanity check of every decoded message in training: is it finite, and is its norm not far above earlier ones?

Bad messages are counted, not stopped: all processes finish the step and share their counts at its end. The cost is one
norm per message and one GPU synchronization per step. Norms are float32, so a message
with a norm above about 1.8e19 counts as not finite, even if its values are finite.
"""

import math

import torch
from torch import Tensor

OUTLIER_FACTOR = 1000.0
"""A message is an outlier if its norm exceeds this multiple of the largest norm in earlier good steps at the same
boundary and direction."""
WARMUP_STEPS = 3
"""Number of good steps before outliers are reported."""

BoundaryDirection = tuple[int, bool]
"""Where a message arrives: boundary index, and True for states (forward) or False for gradients (backward)."""


class MessageSanityCheck:
    """Norms of received messages, and the largest earlier norms, at all boundaries where this process receives,
    including boundaries inside the process."""

    def __init__(self) -> None:
        self._device_norms: dict[BoundaryDirection, list[Tensor]] = {}
        self._norms_of_step: dict[BoundaryDirection, list[float]] = {}
        self._largest: dict[BoundaryDirection, float] = {}
        self._good_steps = 0

    def begin(self) -> None:
        """Starts a step, or repeats it: forgets the messages observed since the last `begin`."""
        self._device_norms, self._norms_of_step = {}, {}

    def observe(self, boundary: int, values: Tensor, *, forward: bool) -> None:
        """Records the norm of a decoded message, without synchronizing with a GPU."""
        self._device_norms.setdefault((boundary, forward), []).append(torch.linalg.vector_norm(values.detach().float()))

    def not_finite(self) -> dict[BoundaryDirection, int]:
        """Number of messages of the step whose norm is not finite, by boundary and direction."""
        return {end: sum(not math.isfinite(norm) for norm in norms) for end, norms in self._norms().items()}

    def outliers(self) -> dict[BoundaryDirection, int]:
        """Number of finite messages of the step whose norm exceeds the outlier limit."""
        return {end: self._too_large(end, norms) for end, norms in self._norms().items()}

    def accept(self) -> None:
        """Adds the norms of this step to the reference; call only if the step was good in every process."""
        for end, norms in self._norms().items():
            self._largest[end] = max(self._largest.get(end, 0.0), *norms)
        self._good_steps += 1

    def _too_large(self, end: BoundaryDirection, norms: list[float]) -> int:
        largest = self._largest.get(end, 0.0)
        if not largest or self._good_steps < WARMUP_STEPS:
            return 0
        return sum(math.isfinite(norm) and norm > OUTLIER_FACTOR * largest for norm in norms)

    def _norms(self) -> dict[BoundaryDirection, list[float]]:
        if self._device_norms:
            numbers = iter(torch.stack([norm for norms in self._device_norms.values() for norm in norms]).tolist())
            self._norms_of_step = {end: [next(numbers) for _ in norms] for end, norms in self._device_norms.items()}
            self._device_norms = {}
        return self._norms_of_step
