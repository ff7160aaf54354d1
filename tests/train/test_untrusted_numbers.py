"""Bytes and seconds that other processes tell of themselves: nonsense ends no step, and a log can hold what is left."""

import math

import msgspec
import numpy as np
import pytest

from thinpipe.training.engine import Engine
from thinpipe.transport.collectives import LocalCollectives

VOCABULARY, BOUNDARIES = 64, 2
TOLD = 2 * 2 * BOUNDARIES + 3
"""Bytes and waits both ways over each boundary; then seconds, idle seconds and memory of one process."""


class Liar(LocalCollectives):
    def __init__(self, lie):
        self.lie = lie

    def all_reduce_sum(self, numbers):
        return [*numbers[:-TOLD], *[self.lie] * TOLD] if len(numbers) > TOLD else list(numbers)


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, -1.0, 1e300, 0.0, 1e15])
def test_a_step_is_computed_whatever_they_tell(run_config, lie):
    engine = Engine(run_config, run_config.model.resolve(VOCABULARY), collectives=Liar(lie))
    ids = np.arange(8 * 17).reshape(8, 17) % VOCABULARY
    outcome = engine.step(0, ids, 1e-3)
    assert outcome.fault is None
    assert math.isfinite(outcome.grad_norm)
    assert outcome.memory == [int(lie) if lie == 1e15 else 0]
    numbers = [number for link in outcome.links for number in (link.nbytes, link.waited_s, link.mbps)]
    assert all(map(math.isfinite, [*numbers, *outcome.busy]))
    msgspec.json.encode((outcome.links, outcome.busy, outcome.memory))
