"""Training steps of a small model on the device, against float64 on the CPU and against themselves.

Bands, by recipe: relative error of loss and gradient norm in the first step, where nothing but rounding differs;
largest difference of losses (nats) over all steps; difference of mean losses (nats), in which rounding errors cancel
and a bias does not. They are 5 to 100 times the largest that a CPU needed with three seeds (in brackets):

    fp32        1e-5 (7e-8)   1e-4 (2e-6)   1e-5 (2e-7)    unit roundoff 6e-8
    bf16-mixed  5e-3 (8e-5)   0.1 (8e-3)    0.005 (1e-4)   matrix products round to 4e-3; weights stay in float32
    bf16        5e-3 (9e-5)   0.2 (2e-2)    0.02 (3e-3)    weights and gradients round to 4e-3 too, stochastically
"""

import hashlib
import math
import time
from dataclasses import dataclass

import torch

from thinpipe.config.run import RunConfig
from thinpipe.device.choice import CPU
from thinpipe.device.device_class import deterministic_algorithms
from thinpipe.doctor.finding import Finding, ok, problem, warning
from thinpipe.selftest.check import REPORT_IT, Figures, RecipeName, Subject
from thinpipe.selftest.workload import LEARNING_RATE, SMALL, VOCABULARY, language, run_config
from thinpipe.training.engine import Engine

STEPS, QUICK_STEPS = 200, 40
_MAX_SECONDS = 60.0
"""Longest time of one trajectory. A slower device computes fewer steps, at least `_MIN_STEPS`."""
_MIN_STEPS = 20


@dataclass(frozen=True)
class Bands:
    first_step: float
    """Relative error of loss and gradient norm."""
    loss: float
    """Nats."""
    mean_loss: float
    """Nats."""


BANDS: dict[RecipeName, Bands] = {
    "fp32": Bands(1e-5, 1e-4, 1e-5),
    "bf16-mixed": Bands(5e-3, 0.1, 0.005),
    "bf16": Bands(5e-3, 0.2, 0.02),
}


def train(config: RunConfig, steps: int, seconds: float = _MAX_SECONDS) -> tuple[list[tuple[float, float]], str]:
    """Loss and gradient norm of each step, and a digest of the weights after the last. Raises RuntimeError for a step
    that is not finite."""
    engine = Engine(config, config.model.resolve(VOCABULARY))
    numbers: list[tuple[float, float]] = []
    began = time.monotonic()
    for step in range(steps):
        outcome = engine.step(step, language(step, SMALL.batch, SMALL.tokens), LEARNING_RATE)
        if outcome.fault is not None:
            raise RuntimeError(f"step {step + 1} is not finite: {outcome.fault}")
        numbers.append((outcome.loss, outcome.grad_norm))
        if step + 1 >= _MIN_STEPS and time.monotonic() - began > seconds:
            break
    hashed = hashlib.sha256()
    for parameter in engine.parameters.values():
        hashed.update(parameter.detach().to(CPU).contiguous().view(torch.uint8).numpy().tobytes())
    return numbers, hashed.hexdigest()


class Reference:
    """Float64 trajectory on the CPU, computed when it is first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[int, list[tuple[float, float]]] = {}

    def __call__(self, steps: int) -> list[tuple[float, float]]:
        if steps not in self._numbers:
            self._numbers[steps] = train(run_config(SMALL, CPU, "fp64"), steps)[0]
        return self._numbers[steps]


def check_steps(what: str, subject: Subject, *, recipe: RecipeName, reference: Reference) -> tuple[Finding, Figures]:
    """Losses and gradient norms against those of float64."""
    subject.recipe(recipe)
    steps = QUICK_STEPS if subject.quick else STEPS
    exact, bands = reference(steps), BANDS[recipe]
    found = train(run_config(SMALL, subject.device, recipe), len(exact))[0]
    pairs = list(zip(found, exact, strict=False))  # the device may have computed fewer
    first = max(abs(one - other) / other for one, other in zip(*pairs[0], strict=True))
    differences = [one[0] - other[0] for one, other in pairs]
    largest, mean = max(map(abs, differences)), abs(math.fsum(differences)) / len(pairs)
    figures: Figures = {
        "steps": len(pairs),
        "first step": first,
        "loss": largest,
        "mean loss": mean,
        "final loss": found[-1][0],
    }
    text = (
        f"{len(pairs)} steps, from float64: the first {first:.1e} (allowed: {bands.first_step:g}), losses "
        f"{largest:.1e} ({bands.loss:g}), mean loss {mean:.1e} ({bands.mean_loss:g})"
    )
    if not (first <= bands.first_step and largest <= bands.loss and mean <= bands.mean_loss):
        return problem(what, text, REPORT_IT), figures
    return ok(what, text), figures


def check_repeats(what: str, subject: Subject) -> tuple[Finding, Figures]:
    """Five steps, twice, as a run computes them and with deterministic algorithms only."""
    config = run_config(SMALL, subject.device, "fp32")
    as_is = train(config, 5) == train(config, 5)
    try:
        with deterministic_algorithms(True):
            deterministic = train(config, 5) == train(config, 5)
    except RuntimeError:  # torch has no deterministic algorithm for an operation on this device
        deterministic = False
    figures: Figures = {"repeats": str(as_is), "repeats if deterministic": str(deterministic)}
    if as_is and deterministic:
        return ok(what, "a step that is computed again has the same bits"), figures
    if deterministic:
        text = "a step that is computed again has the same bits with debug.deterministic only"
        return ok(what, text, "Set debug.deterministic where bits must be equal."), figures
    text = "a step that is computed again has other bits, with debug.deterministic too"
    if subject.is_deterministic:
        return problem(what, text, REPORT_IT), figures
    return warning(what, text, "Expect runs to agree within a band, not bit for bit."), figures
