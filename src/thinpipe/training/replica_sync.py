"""How replicas keep the same weights: there is one, or they merge in rounds. The training loop is the same for all."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from thinpipe.checkpoint import Checkpoint
from thinpipe.config.run import RunConfig
from thinpipe.rounds.leases import Ranges
from thinpipe.training.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Merge:
    """A round that is over: all replicas have the same weights again."""

    round_number: int
    """From 1."""
    finished: int
    """Steps of the run that are merged by now."""
    steps: list[int]
    """Steps of each replica in this round."""
    nbytes: int
    """Bytes of the contributions of this process."""
    squares: float
    """Sum of the squares of the update, of the weights of this process."""


class ReplicaSync(Protocol):
    """What the training loop asks for: batches to train on until the next merge, and the merge."""

    has_rounds: bool
    """True: replicas share weights after a merge only. False: after every step."""

    def lease(self, engine: Engine, finished: int) -> Ranges:
        """Batches to train on before `merge` is called; empty at the end of the run. `finished`: steps of the run so
        far. Batch n is that of step n of a run of one replica, and its learning rate and random numbers are too."""
        ...

    def merge(self, engine: Engine, done: int) -> Merge | None:
        """Called after this many batches of the lease. None: nothing was merged yet."""
        ...

    def rewind(self, engine: Engine) -> None:
        """Gives up what was computed since the last merge: the engine has the weights of all replicas again."""
        ...

    @property
    def rounds(self) -> int | None:
        """Number of merged rounds; None: the run has none."""
        ...

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What a checkpoint has to hold beside the weights: tensors by parameter name and their own name."""
        ...

    def restore(self, engine: Engine, checkpoint: Checkpoint) -> None: ...


class OneReplica:
    """All steps are taken together."""

    has_rounds, rounds = False, None

    def __init__(self, config: RunConfig) -> None:
        self._steps = config.training.steps

    def lease(self, engine: Engine, finished: int) -> Ranges:  # noqa: ARG002
        return (range(finished, self._steps),) if finished < self._steps else ()

    def merge(self, engine: Engine, done: int) -> Merge | None:  # noqa: ARG002
        return None

    def rewind(self, engine: Engine) -> None:
        """Nothing to do: every step is a merge."""

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {}

    def restore(self, engine: Engine, checkpoint: Checkpoint) -> None:
        """Nothing to do."""
