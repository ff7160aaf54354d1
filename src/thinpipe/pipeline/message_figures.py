"""Figures of the messages that cross a boundary in one step: root mean square and mean of their values.

Each end takes its own: the sender of what it is about to encode, the receiver of what it has decoded. The cost is two
reductions a message and one GPU synchronisation a step.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BoundaryDirection = tuple[int, bool]
"""Where a message arrives: boundary index, and True for states (forward) or False for gradients (backward)."""


@dataclass(frozen=True)
class Figures:
    """Of all messages of a step over one boundary in one direction."""

    rms: float
    """Root of the mean square of all values."""
    mean: float


class MessageFigures:
    """Collects the figures of a process's ends of the boundaries, also of boundaries inside the process."""

    def __init__(self) -> None:
        self._on_device: dict[tuple[BoundaryDirection, bool], list[Tensor]] = {}
        self._rows: dict[tuple[BoundaryDirection, bool], list[Figures]] = {}
        """Figures of each message, by boundary and direction and whether it was sent (True) or received (False)."""

    def begin(self) -> None:
        """Starts a step, or repeats it."""
        self._on_device, self._rows = {}, {}

    def observe(self, boundary: int, values: Tensor, *, forward: bool, sent: bool) -> None:
        """Takes a message into account, without synchronising with a GPU."""
        found = values.detach().float()
        both = torch.stack((torch.linalg.vector_norm(found) / math.sqrt(found.numel()), found.mean()))
        self._on_device.setdefault(((boundary, forward), sent), []).append(both)

    def messages(self, *, sent: bool) -> dict[BoundaryDirection, list[Figures]]:
        """Figures of each message of the step, in order."""
        if self._on_device:
            rows = iter(torch.stack([each for end in self._on_device.values() for each in end]).tolist())
            self._rows = {end: [Figures(*next(rows)) for _ in found] for end, found in self._on_device.items()}
            self._on_device = {}
        return {end: found for (end, of_sender), found in self._rows.items() if of_sender == sent}

    def whole(self, *, sent: bool) -> dict[BoundaryDirection, Figures]:
        """Figures of all messages of the step together. Messages have equal numbers of values."""
        return {end: _together(found) for end, found in self.messages(sent=sent).items()}


def _together(found: list[Figures]) -> Figures:
    square = math.fsum(each.rms * each.rms for each in found) / len(found)
    return Figures(math.sqrt(square), math.fsum(each.mean for each in found) / len(found))
