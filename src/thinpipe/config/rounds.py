"""Settings of rounds: replicas that train apart for some steps and then merge. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from thinpipe.core.bounds import MAX_REPLICAS
from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """Replicas that train apart for some steps, then merge what their weights have changed by (local SGD, DiLoCo)."""

    steps: int = 0
    """Optimiser steps of each replica between two merges; 0: no rounds, all steps are taken together. Moments of the
    optimiser start anew in every round."""
    replicas: int = 1
    """Number of replicas. `thinpipe train` computes them one after the other: the reference for a run in which they
    train at the same time."""
    format: Literal["int4", "int8", "fp32"] = "int4"
    """Numbers in which a replica sends what its weights have changed by: 0.52, 1.02 or 4 bytes a weight and round."""
    error_feedback: bool = False
    """Add what the number format has rounded away to the next round's contribution. Takes 4 bytes a weight of host
    memory for each replica."""
    update_format: Literal["int8", "fp32"] = "int8"
    """Numbers in which the merged update is sent back: 1.02 or 4 bytes a weight and round."""
    lr: float = 1.0
    """Factor on the merged update; 1: the mean of the replicas' weights."""
    momentum: float = 0.0
    """Nesterov momentum of the merged updates; 0.9 is usual, but helps only over many rounds."""
    momentum_warmup: int = 0
    """Rounds over which the momentum grows from 0."""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.momentum_warmup < 0:
            raise UserError("rounds.steps and rounds.momentum_warmup must be at least 0")
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise UserError(f"rounds.replicas must be at least 1 and at most {MAX_REPLICAS}, not {self.replicas}")
        if not (0 < self.lr <= 10 and 0 <= self.momentum < 1):
            raise UserError(
                "rounds.lr must be above 0 and at most 10, and rounds.momentum at least 0 and below 1, not "
                f"{self.lr} and {self.momentum}"
            )
        if self.replicas > 1 and not self.steps:
            raise UserError(
                f"rounds.replicas is {self.replicas}, and replicas that never merge are {self.replicas} runs: set "
                "rounds.steps, for example to 16"
            )
