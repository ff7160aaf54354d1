"""The merge of a round: contributions are added in a fixed order, and the sum moves the weights that all share.

A contribution is how far the weights of a replica have moved back from those at the start of the round (a pseudo-
gradient, arXiv 2311.08105). Everything is computed on the CPU in float32, one operation at a time: the same bits on any
machine, whatever the replicas compute on.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class OuterSettings:
    """How a merge moves the shared weights; the mean of the replicas' weights by default."""

    lr: float = 1.0
    momentum: float = 0.0
    """Nesterov momentum of the updates."""
    warmup_rounds: int = 0
    """Rounds over which the momentum grows linearly from 0."""

    def momentum_at(self, round_number: int) -> float:
        """`round_number`: from 1."""
        return self.momentum * min(1.0, (round_number - 1) / self.warmup_rounds if self.warmup_rounds else 1.0)


def pseudo_gradients(start: Tensors, now: Tensors) -> dict[str, Tensor]:
    """How far each weight has moved back since the start of the round."""
    return {name: value - now[name].to("cpu", torch.float32) for name, value in start.items()}


def weighted_sum(contributions: Iterable[tuple[int, Tensors]]) -> dict[str, Tensor]:
    """Sum of contributions, each weighted by its samples, in the order given. One contribution at a time is held beside
    the sum. Raises ValueError if there is none."""
    total: dict[str, Tensor] = {}
    samples = 0
    for count, contribution in contributions:
        samples += count
        for name, value in contribution.items():
            weighted = value * float(count)
            total[name] = weighted if name not in total else total[name].add_(weighted)
    if not samples:
        raise ValueError("a round without samples has no mean")
    return {name: value / float(samples) for name, value in total.items()}


def outer_step(
    weights: dict[str, Tensor], momenta: dict[str, Tensor], update: Tensors, settings: OuterSettings, round_number: int
) -> None:
    """Moves weights and momenta in place. `momenta` is empty as long as there is no momentum."""
    momentum = settings.momentum_at(round_number)
    for name, change in update.items():
        direction = change
        if settings.momentum:
            held = momenta.setdefault(name, torch.zeros_like(change))
            held.mul_(momentum).add_(change)
            direction = change + held * momentum
        weights[name] -= direction * settings.lr
