"""8-bit moments: how near they are to what was stored, and that rounding keeps the mean."""

import pytest
import torch

from thinpipe.config.precision import MOMENT_BLOCK
from thinpipe.device.counter_random import random_bits
from thinpipe.optim.eight_bit import decode, empty_codes, encode

FIRST, SECOND = torch.int8, torch.uint8


def draw(count, decades, *, signed, seed=0):
    """Magnitudes spread evenly over the decades below 1."""
    generator = torch.Generator().manual_seed(seed)
    values = 10 ** (-decades * torch.rand(count, generator=generator))
    return values * torch.where(torch.rand(count, generator=generator) < 0.5, -1.0, 1.0) if signed else values


def noise(values, seed):
    return random_bits(values, seed) & 0xFF


@pytest.mark.parametrize(("dtype", "decades"), [(FIRST, 4), (SECOND, 9)], ids=["first", "second"])
def test_numbers_keep_three_mantissa_bits_over_many_decades(dtype, decades):
    values = draw(1 << 16, decades, signed=dtype == FIRST)
    for random, bound in ((None, 1 / 16), (noise(values, 1), 1 / 8)):
        codes, maxima = encode(values, dtype, random)
        assert (codes.dtype, codes.shape, maxima.dtype) == (dtype, values.shape, torch.int16)
        assert len(maxima) == len(values) // MOMENT_BLOCK
        assert float(((decode(codes, maxima) - values) / values).abs().max()) <= bound


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=["first", "second"])
def test_what_was_decoded_is_encoded_to_the_same_codes(dtype):
    codes, maxima = encode(draw(1000, 4, signed=dtype == FIRST).view(10, 100), dtype)
    again, maxima_again = encode(decode(codes, maxima), dtype)
    assert torch.equal(again, codes)
    assert torch.equal(maxima_again, maxima)


@pytest.mark.parametrize("dtype", [FIRST, SECOND], ids=["first", "second"])
def test_rounding_keeps_the_mean(dtype):
    values = draw(256, 2, signed=dtype == FIRST)
    count = 1000
    mean = sum(decode(*encode(values, dtype, noise(values, seed))).double() for seed in range(count)) / count
    deviation = values.abs() / 16 / count**0.5  # half of the largest step
    assert float(((mean - values) / deviation).abs().max()) < 5


def test_a_slow_decay_is_followed_in_the_mean_and_not_if_rounded_to_nearest():
    """A second moment at beta2 = 0.999 loses a tenth of a percent a step, a hundredth of the step between two codes."""
    followed, stuck = torch.ones(4096), torch.ones(4096)
    followed[1::2] = stuck[1::2] = 2.0**-10
    start = followed.clone()
    for step in range(500):
        followed = decode(*encode(followed * 0.999, SECOND, noise(followed, step)))
        stuck = decode(*encode(stuck * 0.999, SECOND))
    assert torch.equal(stuck, start)
    for part in (slice(0, None, 2), slice(1, None, 2)):
        assert float(followed[part].mean() / start[part].mean()) == pytest.approx(0.999**500, rel=0.02)


def test_a_second_moment_never_becomes_zero_and_zero_stays_zero():
    values = torch.zeros(4 * MOMENT_BLOCK)
    values[0], values[1], values[MOMENT_BLOCK + 3] = 1.0, 1e-30, 1e-37
    for random in (None, torch.zeros(values.shape, dtype=torch.int32)):
        decoded = decode(*encode(values, SECOND, random))
        assert torch.equal(decoded > 0, values > 0)
        assert 1e-30 < float(decoded[1]) < 1e-9  # too large is safe: it makes the update smaller
    assert not decode(*empty_codes(values, SECOND)).any()


def test_a_first_moment_far_below_its_block_becomes_zero():
    """If it was kept at the smallest code instead, a second moment as small as it should be would make it an update."""
    values = torch.tensor([1.0, -1e-6, 3e-5, -3e-5])
    decoded = decode(*encode(values, FIRST))
    assert decoded[1] == 0
    assert torch.equal(decoded.sign(), torch.tensor([1.0, 0.0, 1.0, -1.0]))


@pytest.mark.parametrize("shape", [(1,), (127,), (129,), (3, 43, 2)])
def test_a_last_block_may_be_short(shape):
    values = torch.linspace(0.5, 1.0, torch.Size(shape).numel()).view(shape)
    codes, maxima = encode(values, FIRST)
    assert (codes.shape, len(maxima)) == (shape, -(-values.numel() // MOMENT_BLOCK))
    torch.testing.assert_close(decode(codes, maxima), values, rtol=1 / 16, atol=0)
