"""Rounds of replicas that this process, or pipeline, computes one after the other: the reference for replicas that
train at the same time."""

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from thinpipe.checkpoint import Checkpoint, saved_beside
from thinpipe.config.run import RunConfig, refuse_unmergeable
from thinpipe.models import ModelConfig
from thinpipe.models.protocol import PipelineModelConfig
from thinpipe.rounds.formats import decode, encode
from thinpipe.rounds.layer_files import MOMENTUM
from thinpipe.rounds.leases import Leases, Ranges, count
from thinpipe.rounds.merge import OuterSettings, outer_step, pseudo_gradients, weighted_sum
from thinpipe.training.engine import Engine
from thinpipe.training.replica_sync import Merge

_RESIDUAL = "residual"
Tensors = dict[str, Tensor]


class LocalRounds:
    """Implements `ReplicaSync`. In a pipeline every process merges the weights of its own segments."""

    has_rounds = True

    def __init__(self, config: RunConfig, model: PipelineModelConfig) -> None:
        """Raises UserError if replicas of this model cannot be merged."""
        _refuse(model, config)
        self._settings = config.rounds
        self._outer = OuterSettings(
            lr=config.rounds.lr, momentum=config.rounds.momentum, warmup_rounds=config.rounds.momentum_warmup
        )
        self._leases, self._round, self._replica = Leases(config.training.steps), 1, 0
        self._shared: Tensors = {}
        """Weights at the start of the round."""
        self._momenta: Tensors = {}
        self._residuals: list[Tensors] = [{} for _ in range(config.rounds.replicas)]
        """What the number format had rounded away before this round, by replica."""
        self._new_residuals: list[Tensors] = []
        """Those of this round."""
        self._contributions: list[tuple[int, Tensors]] = []
        """Steps and encoded contributions of the replicas that have computed."""

    def lease(self, engine: Engine, finished: int) -> Ranges:  # noqa: ARG002
        if self._replica:
            engine.set_weights(self._shared)
        else:
            self._shared = engine.weights()
        engine.forget_steps()
        left = self._settings.replicas - self._replica
        number = min(self._settings.steps, -(-count(self._leases.free) // left))
        return self._leases.lease(self._replica, number)

    def merge(self, engine: Engine, done: int) -> Merge | None:
        contribution = pseudo_gradients(self._shared, engine.weights())
        residual = self._residuals[self._replica]
        if residual:
            contribution = {name: value + residual[name] for name, value in contribution.items()}
        encoded = encode(contribution, self._settings.format)
        if self._settings.error_feedback:
            sent = self._decode(encoded)
            self._new_residuals.append({name: value - sent[name] for name, value in contribution.items()})
        self._contributions.append((done, encoded))
        self._replica += 1
        if self._replica < self._settings.replicas and self._leases.free:
            return None
        return self._close(engine)

    def _close(self, engine: Engine) -> Merge:
        steps = [done for done, _ in self._contributions]
        update = weighted_sum((done, self._decode(encoded)) for done, encoded in self._contributions)
        form = self._settings.update_format
        update = decode(encode(update, form), self._shapes, form)
        outer_step(self._shared, self._momenta, update, self._outer, self._round)
        engine.set_weights(self._shared)
        engine.forget_steps()
        self._leases.close(dict(enumerate(steps)))
        merge = Merge(
            round_number=self._round,
            finished=self._leases.done,
            steps=steps,
            nbytes=sum(tensor.nbytes for _, encoded in self._contributions for tensor in encoded.values()),
            squares=sum(value.double().square().sum().item() for value in update.values()),
        )
        for replica, residual in enumerate(self._new_residuals):
            self._residuals[replica] = residual
        self._round += 1
        self._begin()
        return merge

    def _begin(self) -> None:
        self._replica, self._contributions, self._new_residuals = 0, [], []
        self._leases.held.clear()

    def rewind(self, engine: Engine) -> None:
        self._begin()
        engine.set_weights(self._shared)
        engine.forget_steps()

    def _decode(self, encoded: Mapping[str, Tensor]) -> Tensors:
        return decode(encoded, self._shapes, self._settings.format)

    @property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in self._shared.items()}

    @property
    def rounds(self) -> int | None:
        return self._round - 1

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        kinds = {MOMENTUM: self._momenta} | {
            f"{_RESIDUAL}.{replica}": residual for replica, residual in enumerate(self._residuals)
        }
        names = dict.fromkeys(name for held in kinds.values() for name in held)
        return {name: {key: held[name] for key, held in kinds.items() if name in held} for name in names}

    def restore(self, engine: Engine, checkpoint: Checkpoint) -> None:
        self._leases.counted = (range(checkpoint.manifest.step),) if checkpoint.manifest.step else ()
        saved = saved_beside(checkpoint, engine.parameters)
        if self._settings.momentum:
            self._momenta = {name: held[MOMENTUM] for name, held in saved.items() if MOMENTUM in held}
        for replica in range(self._settings.replicas if self._settings.error_feedback else 0):
            key = f"{_RESIDUAL}.{replica}"
            self._residuals[replica] = {name: held[key] for name, held in saved.items() if key in held}
        merged = checkpoint.manifest.rounds
        self._round = 1 if merged is msgspec.UNSET else merged + 1


def _refuse(model: PipelineModelConfig, config: RunConfig) -> None:
    """As `RunConfig` does for what its settings show: the model may be that of a checkpoint."""
    if isinstance(model, ModelConfig):
        refuse_unmergeable(model.subspace, model.projection, config.basis)
