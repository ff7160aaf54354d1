"""Random numbers of rounding and dropout: equal on every device, uniform, and unrelated between positions and keys."""

import itertools

import numpy as np
import pytest
import torch

from thinpipe.boundary.codec import codec
from thinpipe.core.seeds import derive_seed
from thinpipe.device import counter_random
from thinpipe.device.counter_random import dropout, random_bits, round_to_bf16, uniform

WORDS = (7, "rounding", 3)
COUNT = 1 << 20
DRAWS = {
    "seed 0": (0, 0, 0, 0, "backward"),
    "step": (0, 1, 0, 0, "backward"),
    "micro-batch": (0, 0, 1, 0, "backward"),
    "boundary": (0, 0, 0, 1, "backward"),
    "direction": (0, 0, 0, 0, "codec"),
}


def expected(count, *words):
    """The hash in numpy's unsigned integers."""
    second, first = divmod(derive_seed(*words), 1 << 32)
    x = np.arange(count, dtype=np.uint32) ^ np.uint32(first)
    x ^= x >> np.uint32(17)
    x = (x * np.uint32(0xED5AD4BB)) ^ np.uint32(second)
    x ^= x >> np.uint32(11)
    x *= np.uint32(0xAC4C1B51)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x31848BAB)
    x ^= x >> np.uint32(14)
    return torch.from_numpy((x >> np.uint32(8)).astype(np.float32) / np.float32(1 << 24))


@pytest.fixture(scope="module")
def drawn():
    return {name: uniform(torch.empty(COUNT), *words).double() for name, words in DRAWS.items()}


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 5), (300, 1001), ((1 << 18) + 3,)])
def test_numbers_are_those_of_the_hash(shape):
    numbers = uniform(torch.empty(shape), *WORDS)
    assert (numbers.shape, numbers.dtype) == (shape, torch.float32)
    assert torch.equal(numbers.flatten(), expected(numbers.numel(), *WORDS))


def test_a_number_depends_on_its_position_alone(monkeypatch):
    numbers = uniform(torch.empty(5000), *WORDS)
    monkeypatch.setattr(counter_random, "_CPU_BLOCK", 1 << 6)
    assert torch.equal(uniform(torch.empty(50, 100).T.double(), *WORDS).flatten(), numbers)
    assert torch.equal(uniform(torch.empty(777), *WORDS), numbers[:777])


def test_the_default_dtype_of_torch_changes_no_number():
    numbers, kept = uniform(torch.empty(100), *WORDS), dropout(torch.ones(100), 0.5, *WORDS)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(uniform(torch.empty(100), *WORDS), numbers)
        assert torch.equal(dropout(torch.ones(100, dtype=torch.float32), 0.5, *WORDS), kept)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("float64", [True, False], ids=["with float64", "without float64"])
def test_the_second_device_draws_the_same_bits(sim, monkeypatch, float64):
    sim.set_float64(float64)
    monkeypatch.setattr(counter_random, "_DEVICE_BLOCK", 1 << 10)
    x = torch.linspace(-1, 1, 3 * 1025).view(3, 1025)
    results = {}
    for device in ("cpu", "sim"):
        there = x.to(device, copy=True).requires_grad_()
        dropped = dropout(there, 0.3, *WORDS)
        dropped.square().sum().backward()
        results[device] = [each.detach().cpu() for each in (uniform(there, *WORDS), dropped, there.grad)]
    assert all(torch.equal(here, there) for here, there in zip(results["cpu"], results["sim"], strict=True))


@pytest.mark.parametrize(
    ("name", "settings"),
    [("int8", {}), ("int4", {}), ("quantise", {"bits": 3}), ("topk", {"keep": 0.2, "format": "int4"})],
)
def test_a_message_is_rounded_on_the_device_without_a_copy_from_the_host(sim, name, settings):
    x = torch.linspace(-1, 1, 2 * 5 * 64).sin().view(2, 5, 64)
    encoded = codec(name, x.shape, stochastic=True, **settings).encode(x)
    there, method = x.to("sim"), codec(name, x.shape, stochastic=True, **settings)
    nearest = codec(name, x.shape, **settings)
    nearest.encode(there)  # the rotation's signs are copied once
    copies = []
    for each in (nearest, method):
        sim.reset_counts()
        on_device = each.encode(there)
        copies.append({what: count for what, count in sim.counts().items() if what.startswith("to_device")})
    assert copies[0] == copies[1]
    assert torch.equal(on_device.cpu(), encoded)


def test_bits_of_a_part_are_those_of_the_whole():
    bits = random_bits(torch.empty(3, 1001), *WORDS)
    assert bits.dtype == torch.int32
    assert torch.equal(random_bits(torch.empty(2, 1001), *WORDS, start=1001), bits[1:])
    upper = (bits >> 8).bitwise_and_(0xFFFFFF).float() * 2.0**-24
    assert torch.equal(upper, uniform(bits, *WORDS))


def test_rounding_to_bfloat16_keeps_the_mean_and_what_is_bfloat16_already():
    exact = torch.tensor([1.0, -2.5, 0.0, 3e38, -1e-30]).bfloat16()
    kept = exact[:, None].expand(5, 1000).float().clone()
    assert torch.equal(round_to_bf16(kept, random_bits(kept, *WORDS)), exact[:, None].expand(5, 1000))
    values = torch.tensor([1.001, -1.001, 1.007, 0.3, -7e-20])
    many = values[:, None].expand(5, COUNT // 4).clone()
    rounded = round_to_bf16(many, random_bits(many, *WORDS)).double()
    assert (rounded.unique(dim=1).shape[1], len(rounded[0].unique())) == (2**5, 2)  # a neighbour on either side, alone
    error = (rounded.mean(1) - values.double()).abs() / values.double().abs()
    assert float(error.max()) < 5 * 2**-8 / (COUNT // 4) ** 0.5


def test_the_second_device_rounds_to_the_same_bits(sim):  # noqa: ARG001
    values = torch.linspace(-1, 1, 3 * 1025).view(3, 1025)
    expected = round_to_bf16(values.clone(), random_bits(values, *WORDS))
    there = values.to("sim")
    assert torch.equal(round_to_bf16(there, random_bits(there, *WORDS)).cpu(), expected)


def test_numbers_are_uniform(drawn):
    """Chi-square of 4096 cells from the highest bits and from the lowest: its mean is 4095, its deviation 90. The
    Kolmogorov-Smirnov distance exceeds 1.95 / sqrt(count) once in a thousand draws."""
    for numbers in drawn.values():
        assert 0 <= float(numbers.min()) < 1e-5
        assert 1 - 1e-5 < float(numbers.max()) < 1
        for cells in (numbers * 4096, (numbers * 2**24) % 4096):
            counts = cells.long().bincount(minlength=4096).double()
            assert abs(float(((counts - COUNT / 4096) ** 2).sum() / (COUNT / 4096)) - 4095) < 5 * 90
        ranks = torch.arange(COUNT, dtype=torch.float64) / COUNT
        assert float((numbers.sort().values - ranks).abs().max()) < 1.95 / COUNT**0.5


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 512, 768, 1024, 4096, 1 << 16])
def test_positions_are_unrelated(drawn, distance):
    for numbers in drawn.values():
        assert_unrelated(numbers[:-distance], numbers[distance:])


@pytest.mark.parametrize("pair", [*itertools.combinations(DRAWS, 2)], ids=" and ".join)
def test_keys_are_unrelated(drawn, pair):
    assert_unrelated(*(drawn[name] for name in pair))


def assert_unrelated(left, right):
    """Pairs fill a square of 64 x 64 cells evenly (chi-square as above); correlated by less than 5 deviations."""
    counts = ((left * 64).long() * 64 + (right * 64).long()).bincount(minlength=4096).double()
    assert abs(float(((counts - len(left) / 4096) ** 2).sum() / (len(left) / 4096)) - 4095) < 5 * 90
    assert abs(float(((left - 0.5) * (right - 0.5)).mean()) * 12) < 5 / len(left) ** 0.5


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_zeroes_its_share_and_keeps_the_mean(rate):
    x = torch.full((1000, 1000), 3.0, requires_grad=True)
    dropped = dropout(x, rate, *WORDS)
    share = float((dropped == 0).double().mean())
    assert abs(share - rate) < 5 * (rate * (1 - rate)) ** 0.5 / 1000
    assert torch.equal(dropped, torch.where(dropped == 0, 0.0, x * (1 / (1 - rate))))
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach() / 3)


def test_dropout_saves_one_byte_per_element():
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        dropout(torch.ones(1000, requires_grad=True), 0.1, *WORDS)
    assert saved == [1000]
