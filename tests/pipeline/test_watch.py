"""What counts as a bad message."""

import math

import pytest
import torch

from thinpipe.pipeline.watch import FIRST_STEPS, Watch


def values(size=1.0):
    return torch.full((2, 5, 4), size)


def after_good_steps(steps, size=1.0):
    watch = Watch()
    for _ in range(steps):
        watch.begin()
        watch.see(0, values(size), forward=True)
        watch.accept()
    watch.begin()
    return watch


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bad_number_is_seen_from_the_first_step(bad, dtype):
    watch, message = Watch(), values().to(dtype)
    message[1, 3, 2] = bad
    watch.begin()
    watch.see(0, values(), forward=True)
    watch.see(0, message, forward=True)
    watch.see(1, values(), forward=False)
    assert watch.not_finite() == {(0, True): 1, (1, False): 0}
    assert watch.absurd() == {(0, True): 0, (1, False): 0}


@pytest.mark.parametrize(("times", "found"), [(900, 0), (1100, 1)])
def test_a_message_is_compared_with_the_largest_of_good_steps(times, found):
    watch = after_good_steps(FIRST_STEPS)
    watch.see(0, values(times), forward=True)
    watch.see(0, values(), forward=False)
    assert watch.absurd() == {(0, True): found, (0, False): 0}, "each direction for itself"


def test_nothing_is_absurd_at_first_or_after_nothing_but_zeros():
    watch = after_good_steps(FIRST_STEPS - 1)
    watch.see(0, values(1e9), forward=True)
    assert not any(watch.absurd().values())
    watch = after_good_steps(10, size=0.0)
    watch.see(0, values(1e9), forward=True)
    assert not any(watch.absurd().values())


def test_a_step_that_was_not_accepted_is_not_compared_with():
    watch = after_good_steps(FIRST_STEPS)
    for _ in range(2):
        watch.begin()
        watch.see(0, values(1e6), forward=True)
        assert watch.absurd() == {(0, True): 1}
