"""What counts as a bad message."""

import math

import pytest
import torch

from thinpipe.pipeline.sanity import WARMUP_STEPS, MessageSanityCheck


def values(size=1.0):
    return torch.full((2, 5, 4), size)


def after_good_steps(steps, size=1.0):
    sanity = MessageSanityCheck()
    for _ in range(steps):
        sanity.begin()
        sanity.observe(0, values(size), forward=True)
        sanity.accept()
    sanity.begin()
    return sanity


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_bad_number_is_seen_from_the_first_step(bad, dtype):
    sanity, message = MessageSanityCheck(), values().to(dtype)
    message[1, 3, 2] = bad
    sanity.begin()
    sanity.observe(0, values(), forward=True)
    sanity.observe(0, message, forward=True)
    sanity.observe(1, values(), forward=False)
    assert sanity.not_finite() == {(0, True): 1, (1, False): 0}
    assert sanity.outliers() == {(0, True): 0, (1, False): 0}


@pytest.mark.parametrize(("times", "found"), [(900, 0), (1100, 1)])
def test_a_message_is_compared_with_the_largest_of_good_steps(times, found):
    sanity = after_good_steps(WARMUP_STEPS)
    sanity.observe(0, values(times), forward=True)
    sanity.observe(0, values(), forward=False)
    assert sanity.outliers() == {(0, True): found, (0, False): 0}, "each direction for itself"


def test_nothing_is_absurd_at_first_or_after_nothing_but_zeros():
    sanity = after_good_steps(WARMUP_STEPS - 1)
    sanity.observe(0, values(1e9), forward=True)
    assert not any(sanity.outliers().values())
    sanity = after_good_steps(10, size=0.0)
    sanity.observe(0, values(1e9), forward=True)
    assert not any(sanity.outliers().values())


def test_a_step_that_was_not_accepted_is_not_compared_with():
    sanity = after_good_steps(WARMUP_STEPS)
    for _ in range(2):
        sanity.begin()
        sanity.observe(0, values(1e6), forward=True)
        assert sanity.outliers() == {(0, True): 1}
