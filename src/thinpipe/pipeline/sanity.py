"""Sanity check of every decoded message in training: is it finite, and is it not far larger than earlier ones?

Bad messages are counted, not stopped: all processes finish the step and share their counts at its end. Root mean
squares (`pipeline.message_figures`) are float32, so a message with a norm above about 1.8e19 counts as not finite, even
if its values are finite.
"""

import math

from torch import Tensor

from thinpipe.pipeline.message_figures import BoundaryDirection, MessageFigures

OUTLIER_FACTOR = 1000.0
"""A message is an outlier if its root mean square exceeds this multiple of the largest in earlier good steps at the
same boundary and direction."""
WARMUP_STEPS = 3
"""Number of good steps before outliers are reported."""


class MessageSanityCheck:
    """Received messages, and the largest earlier ones, at all boundaries where this process receives, including
    boundaries inside the process. Takes the figures of sent messages too."""

    def __init__(self) -> None:
        self.figures = MessageFigures()
        self._largest: dict[BoundaryDirection, float] = {}
        self._good_steps = 0

    def begin(self) -> None:
        """Starts a step, or repeats it: forgets the messages observed since the last `begin`."""
        self.figures.begin()

    def observe(self, boundary: int, values: Tensor, *, forward: bool) -> None:
        """Takes a decoded message into account, without synchronizing with a GPU."""
        self.figures.observe(boundary, values, forward=forward, sent=False)

    def observe_sent(self, boundary: int, values: Tensor, *, forward: bool) -> None:
        """Takes the figures of values that are about to be encoded."""
        self.figures.observe(boundary, values, forward=forward, sent=True)

    def not_finite(self) -> dict[BoundaryDirection, int]:
        """Number of messages of the step that are not finite, by boundary and direction."""
        return {end: sum(not math.isfinite(size) for size in sizes) for end, sizes in self._sizes().items()}

    def outliers(self) -> dict[BoundaryDirection, int]:
        """Number of finite messages of the step that exceed the outlier limit."""
        return {end: self._too_large(end, sizes) for end, sizes in self._sizes().items()}

    def accept(self) -> None:
        """Adds the messages of this step to the reference; call only if the step was good in every process."""
        for end, sizes in self._sizes().items():
            self._largest[end] = max(self._largest.get(end, 0.0), *sizes)
        self._good_steps += 1

    def _too_large(self, end: BoundaryDirection, sizes: list[float]) -> int:
        largest = self._largest.get(end, 0.0)
        if not largest or self._good_steps < WARMUP_STEPS:
            return 0
        return sum(math.isfinite(size) and size > OUTLIER_FACTOR * largest for size in sizes)

    def _sizes(self) -> dict[BoundaryDirection, list[float]]:
        return {end: [each.rms for each in found] for end, found in self.figures.messages(sent=False).items()}
