"""The learning rate over a run."""

import itertools

import pytest

from thinpipe.config.run import LRSchedulerConfig
from thinpipe.optim.lr_schedule import lr_factor


def curve(total=100, **settings):
    schedule = LRSchedulerConfig(warmup_steps=10, **settings)
    return [lr_factor(step, total, schedule) for step in range(total)]


@pytest.mark.parametrize("decay_type", ["cosine", "linear", "wsd"])
def test_rises_to_one_and_ends_at_the_lowest(decay_type):
    factors = curve(decay_type=decay_type, min_lr_factor=0.1)
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == 1.0
    assert factors[-1] == pytest.approx(0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(factors[9:]))


def test_cosine_is_half_way_in_the_middle():
    assert curve(decay_type="cosine", min_lr_factor=0.0)[54] == pytest.approx(0.5, abs=0.01)


def test_wsd_stays_until_the_last_part():
    factors = curve(decay_type="wsd", decay_ratio=0.3, min_lr_factor=0.0)
    assert factors[10:70] == [1.0] * 60
    assert factors[84] == pytest.approx(0.5)


def test_no_warm_up():
    assert lr_factor(0, 10, LRSchedulerConfig(warmup_steps=0)) > 0.9
