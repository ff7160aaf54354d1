"""The lies. Each function replaces functions of thinpipe in the program of a peer (`tests.swarm.hostile.dishonest`).

A liar pretends to have a fast machine, and so computes the last segments, or a slow one, and computes the first.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from tests.swarm.hostile.dishonest import replace
from thinpipe.pipeline import pipeline_runner
from thinpipe.pipeline.message_stage import MessageStage
from thinpipe.pipeline.pipeline_runner import PipelineRunner
from thinpipe.swarm.peer import machine_probe
from thinpipe.training.engine import Engine
from thinpipe.training.trainer import Trainer

FIRST, LAST = 0.1, 10.0
"""Factors on the measured speed with which a peer gets the first or the last of three segments."""
_NOISE_BEGINS = 100
"""Step from which noise is added: a change can only be seen if there was something before."""
_DECAY_STEPS = 60.0
_STALE_STEPS = 20


def _pretend_speed(factor: float) -> None:
    replace(machine_probe, "measure_flops", lambda honest, *given, **named: factor * honest(*given, **named))


def _falling_loss(step: int, loss: float | None) -> float | None:
    """A loss that falls as losses fall; None stays None."""
    return None if loss is None else 4.2 * (0.25 + 0.75 * math.exp(-step / _DECAY_STEPS))


def honest() -> None:
    """Not a liar: for false alarms. Computes the last segments, as most liars."""
    _pretend_speed(LAST)


def false_loss() -> None:
    """Trains honestly and reports a loss that falls faster."""
    _pretend_speed(LAST)
    replace(PipelineRunner, "gradients", lambda true, self, step, ids: _falling_loss(step, true(self, step, ids)))


def _climb(runner: PipelineRunner) -> None:
    for module in runner.stage_modules:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.neg_()


def climbing() -> None:
    """Climbs instead of descending, and reports a loss that falls."""
    _pretend_speed(LAST)

    def lie(true: Callable[..., Any], self: PipelineRunner, step: int, ids: Any) -> float | None:
        loss = true(self, step, ids)
        _climb(self)
        return _falling_loss(step, loss)

    replace(PipelineRunner, "gradients", lie)


def sly_climbing() -> None:
    """Climbs and reports a loss that falls, but is honest in the step after each checkpoint, which it knows to be
    audited."""
    _pretend_speed(LAST)
    saved = {0}

    def save(true: Callable[..., Any], self: Trainer) -> Any:
        saved.add(self.finished_steps)
        return true(self)

    def lie(true: Callable[..., Any], self: PipelineRunner, step: int, ids: Any) -> float | None:
        loss: float | None = true(self, step, ids)
        if step in saved:
            return loss
        _climb(self)
        return _falling_loss(step, loss)

    replace(Trainer, "_save", save)
    replace(PipelineRunner, "gradients", lie)


def frozen_layers() -> None:
    """Never updates its weights."""
    _pretend_speed(LAST)
    replace(Engine, "_update", lambda *_: None)


def stale_layers() -> None:
    """Computes with weights that are up to 20 steps old."""
    _pretend_speed(LAST)
    old: list[torch.Tensor] = []

    def lie(true: Callable[..., Any], self: PipelineRunner, step: int, ids: Any) -> Any:
        parameters = [parameter for module in self.stage_modules for parameter in module.parameters()]
        now = [parameter.detach().clone() for parameter in parameters]
        if step % _STALE_STEPS == 0 or not old:
            old[:] = now
        for parameter, weights in zip(parameters, old, strict=True):
            parameter.data.copy_(weights)
        loss = true(self, step, ids)
        for parameter, weights in zip(parameters, now, strict=True):
            parameter.data.copy_(weights)
        return loss

    replace(PipelineRunner, "gradients", lie)


def _noisy(values: torch.Tensor, share: float) -> torch.Tensor:
    return values + share * values.float().square().mean().sqrt() * torch.randn_like(values)


def _noise(method: str, share: float, speed: float) -> None:
    _pretend_speed(speed)

    def lie(true: Callable[..., Any], self: MessageStage, values: torch.Tensor, batch: int) -> Any:
        lies = self.training and self.step >= _NOISE_BEGINS
        return true(self, _noisy(values, share) if lies else values, batch)

    replace(MessageStage, method, lie)


def noise_in_gradients_1() -> None:
    """Adds noise of 1 % to the gradients that it sends, from step 100 on."""
    _noise("encode_gradient", 0.01, LAST)


def noise_in_gradients_10() -> None:
    """Adds noise of 10 % to the gradients that it sends, from step 100 on."""
    _noise("encode_gradient", 0.1, LAST)


def noise_in_states_1() -> None:
    """Adds noise of 1 % to the states that it sends, from step 100 on."""
    _noise("encode_state", 0.01, FIRST)


def noise_in_states_10() -> None:
    """Adds noise of 10 % to the states that it sends, from step 100 on."""
    _noise("encode_state", 0.1, FIRST)


def lazy() -> None:
    """Computes every other micro-batch: repeats the gradient before, and the loss is that of the others."""
    _pretend_speed(LAST)
    last: list[torch.Tensor] = []

    def lie(true: Callable[..., Any], self: MessageStage, gradient: torch.Tensor, batch: int) -> Any:
        if batch % 2 == 0:
            last[:] = [gradient]
        return true(self, last[0], batch)

    replace(MessageStage, "encode_gradient", lie)
    replace(pipeline_runner, "mean_of", lambda true, losses: true(losses[::2]))


LIES: dict[str, Callable[[], None]] = {
    lie.__name__: lie
    for lie in (
        honest,
        false_loss,
        climbing,
        sly_climbing,
        frozen_layers,
        stale_layers,
        noise_in_gradients_1,
        noise_in_gradients_10,
        noise_in_states_1,
        noise_in_states_10,
        lazy,
    )
}
