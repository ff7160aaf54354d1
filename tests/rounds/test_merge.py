"""Contributions and merges: what is encoded, what is added, and how the shared weights move."""

import numpy as np
import pytest
import torch

from thinpipe.rounds.formats import BLOCK, FormatError, decode, encode
from thinpipe.rounds.merge import OuterSettings, outer_step, pseudo_gradients, weighted_sum

SHAPES = {"matrix": torch.Size((7, 100)), "norm": torch.Size((5,)), "scalar": torch.Size(())}
FORMATS = ("fp32", "int8", "int4")


def some(seed=0, scale=1e-3):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(("form", "steps"), [("int8", 127), ("int4", 7)])
def test_numbers_come_back_within_half_a_step_of_their_block(form, steps):
    values = some()
    found = decode(encode(values, form), SHAPES, form)
    for name, value in values.items():
        flat, error = value.flatten(), (found[name] - value).abs().flatten()
        for start in range(0, len(flat), BLOCK):
            largest = flat[start : start + BLOCK].abs().max()
            assert error[start : start + BLOCK].max() <= 0.501 * largest / steps


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_decoded_is_encoded_to_the_same_bytes(form):
    once = encode(some(), form)
    again = encode(decode(once, SHAPES, form), form)
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("form", FORMATS)
def test_zeros_and_the_largest_numbers_survive(form):
    values = {"matrix": torch.zeros(7, 100), "norm": torch.full((5,), -1e19), "scalar": torch.tensor(1e-38)}
    found = decode(encode(values, form), SHAPES, form)
    assert torch.equal(found["matrix"], values["matrix"])
    torch.testing.assert_close(found["norm"], values["norm"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_denormals_keep_their_sign(form):
    values = {"matrix": torch.full((7, 100), 1e-44), "norm": torch.full((5,), -1e-44), "scalar": torch.tensor(1e-45)}
    found = decode(encode(values, form), SHAPES, form)
    assert all((found[name].sign() * value.sign() >= 0).all() for name, value in values.items())


def test_int4_takes_half_a_byte_and_a_scale_for_each_block():
    encoded = encode({"weights": torch.randn(64, 512)}, "int4")
    assert sum(tensor.nbytes for tensor in encoded.values()) == 64 * 512 / 2 + 64 * 512 / BLOCK * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda e: e.pop("norm"), "more or less"),
        (lambda e: e.update(other=torch.zeros(1)), "more or less"),
        (lambda e: e.update({"norm:scale": torch.tensor([torch.inf])}), "not finite"),
        (lambda e: e.update({"norm:scale": torch.tensor([torch.nan])}), "not finite"),
        (lambda e: e.update(norm=e["norm"].to(torch.int32)), "int32"),
        (lambda e: e.update(norm=e["norm"][:, :1]), "not torch.uint8"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    encoded = encode(some(), "int4")
    change(encoded)
    with pytest.raises(FormatError, match=says):
        decode(encoded, SHAPES, "int4")


def test_the_sum_is_weighted_by_samples_and_equals_numpy_bit_for_bit():
    contributions = [(16, some(1)), (4, some(2)), (16, some(3))]
    found = weighted_sum(contributions)
    for name in SHAPES:
        total = np.float32(0)
        for index, (count, values) in enumerate(contributions):
            weighted = values[name].numpy() * np.float32(count)
            total = weighted if not index else total + weighted
        assert (found[name].numpy() == total / np.float32(36)).all()


def test_one_replica_changes_nothing_by_merging():
    """With the mean, the shared weights become those of the replica, but for the rounding of the difference."""
    start, now = some(1, 1.0), some(2, 1.0)
    weights = {name: value.clone() for name, value in start.items()}
    outer_step(weights, {}, weighted_sum([(8, pseudo_gradients(start, now))]), OuterSettings(), 1)
    for name in SHAPES:
        torch.testing.assert_close(weights[name], now[name], rtol=1e-6, atol=1e-6)


def test_nesterov_momentum_is_that_of_torch():
    settings = OuterSettings(lr=0.7, momentum=0.9)
    parameters = [torch.nn.Parameter(value.clone()) for value in some(1, 1.0).values()]
    optimizer = torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)
    weights, momenta = some(1, 1.0), {}
    for number in range(1, 5):
        update = some(10 + number)
        for parameter, gradient in zip(parameters, update.values(), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        outer_step(weights, momenta, update, settings, number)
    for parameter, value in zip(parameters, weights.values(), strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-6, atol=1e-7)


def test_momentum_warms_up():
    settings = OuterSettings(momentum=0.8, warmup_rounds=4)
    assert [settings.momentum_at(number) for number in (1, 2, 3, 5, 9)] == pytest.approx([0, 0.2, 0.4, 0.8, 0.8])
    assert OuterSettings(momentum=0.8).momentum_at(1) == 0.8


def test_a_round_without_samples_has_no_mean():
    with pytest.raises(ValueError, match="no mean"):
        weighted_sum([])
