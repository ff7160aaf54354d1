"""Steps of bfloat16 parameters: float32's in the mean, whatever the slices, with the bytes that the recipe states."""

import pytest
import torch
from torch import nn

from thinpipe.config.precision import RECIPES
from thinpipe.optim import RowwiseAdamW, bf16_update
from thinpipe.optim.gradient_sums import GradientSums, gradient_norms
from thinpipe.optim.rowwise_adamw import second_moment_shape
from thinpipe.subspace.basis import orthonormalise
from thinpipe.subspace.parameter_tags import mark_coordinates, mark_orthonormal

SHAPE = (300, 40)


def parameters_of(kind, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SHAPE, generator=generator) * 0.02
    if kind == "orthonormal":
        values = orthonormalise(values)
    parameter = nn.Parameter(values.to(dtype))
    if kind == "orthonormal":
        mark_orthonormal(parameter)
    elif kind != "matrix":
        mark_coordinates(parameter, axis={"rows": 1, "columns": 0}[kind], full_width=64)
    return parameter


KINDS = ["matrix", "rows", "columns", "orthonormal"]


def train(parameter, steps=30, lr=1e-3, **settings):
    optimizer = RowwiseAdamW([("weight", parameter)], lr=lr, **settings)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(SHAPE, generator=generator)
    for _ in range(steps):
        gradient = direction + torch.randn(SHAPE, generator=generator)
        parameter.grad = gradient.bfloat16().to(parameter.dtype)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_the_trajectory_is_that_of_float32(kind):
    """The way of 30 steps, against the same steps in float32: the mean over all weights along it, and the rest, which
    is rounding."""
    narrow, wide = parameters_of(kind), parameters_of(kind, torch.bfloat16)
    wide = nn.Parameter(wide.detach().float())
    wide.__dict__.update(narrow.__dict__)  # tags
    start = wide.detach().clone()
    train(narrow)
    train(wide)
    way, difference = (wide - start).detach(), (narrow.float() - wide).detach()
    along = float((difference * way).sum() / way.square().sum())
    assert abs(along) < 0.02
    assert float(difference.norm() / way.norm()) < 0.15


def test_updates_below_the_step_between_two_weights_add_up():
    """A weight of 1 has its neighbours 1/128 above and 1/256 below; every update is 1e-4."""
    parameter = nn.Parameter(torch.ones(SHAPE, dtype=torch.bfloat16))
    optimizer = RowwiseAdamW([("weight", parameter)], lr=1e-4, weight_decay=0.0)
    for _ in range(50):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert float(parameter.detach().float().mean()) == pytest.approx(1 - 50e-4, abs=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [1, 1 << 13])
def test_slices_change_no_bit(kind, numbers, monkeypatch):
    whole, sliced = parameters_of(kind), parameters_of(kind)
    expected = train(whole).state[whole]
    monkeypatch.setattr(bf16_update, "_CPU_SLICE", numbers)
    assert len([*bf16_update.row_slices(whole)]) > 1
    state = train(sliced).state[sliced]
    assert torch.equal(whole, sliced)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)


@pytest.mark.parametrize("kind", [*KINDS, "vector"])
def test_moments_have_the_bytes_that_the_recipe_states(kind):
    parameter = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16)) if kind == "vector" else parameters_of(kind)
    optimizer = RowwiseAdamW([("weight", parameter)])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = sum(tensor.nbytes for key, tensor in optimizer.state[parameter].items() if key != "step")
    numel = second_moment_shape(parameter, "row").numel()
    assert held == RECIPES["bf16"].moments_nbytes(parameter.shape, numel)
    if kind == "matrix":
        assert 2 < held / parameter.numel() < 2.04


def test_a_factor_on_gradients_is_applied_in_float32():
    by_factor, by_hand = parameters_of("matrix"), parameters_of("matrix")
    for parameter, factor in ((by_factor, 2.0**-5), (by_hand, 1.0)):
        optimizer = RowwiseAdamW([("weight", parameter)])
        optimizer.gradient_factor = factor
        parameter.grad = torch.full_like(parameter, 0.3) * (1.0 if factor < 1 else 2.0**-5)
        optimizer.step()
    assert torch.equal(by_factor, by_hand)
    assert not torch.equal(by_factor, parameters_of("matrix"))


def test_names_and_seeds_choose_the_rounding():
    results = []
    for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1)):
        parameter = parameters_of("matrix")
        optimizer = RowwiseAdamW([(name, parameter)], lr=1e-5, seed=seed)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        results.append(parameter.detach())
    assert [torch.equal(results[0], other) for other in results[1:]] == [True, False, False]


def test_parameters_without_a_name_are_refused():
    parameter = parameters_of("matrix")
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match="names"):
        RowwiseAdamW([parameter]).step()


def test_a_state_dict_keeps_moments_as_they_are():
    parameter = parameters_of("matrix")
    optimizer = train(parameter, steps=3)
    resumed = RowwiseAdamW([("weight", parameter)])
    resumed.load_state_dict(optimizer.state_dict())
    expected, found = optimizer.state[parameter], resumed.state[parameter]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        assert torch.equal(found[key], value)


def backward(parameter, gradient):
    (parameter * gradient).sum().backward()


def test_gradients_of_many_micro_batches_add_up():
    """Of equal gradients, autograd's own sum in bfloat16 ends at 256 times the first at the latest."""
    plain, summed = parameters_of("matrix"), parameters_of("matrix")
    sums = GradientSums({"weight": summed}, seed=0)
    sums.begin(0)
    gradient = torch.full(SHAPE, 0.3, dtype=torch.bfloat16)
    for _ in range(1000):
        backward(plain, gradient)
        backward(summed, gradient)
        assert summed.grad is None  # freed at once
    sums.finish()
    exact = 1000 * float(gradient[0, 0])
    assert float(plain.grad.float().mean()) < 0.5 * exact
    assert float(summed.grad.float().mean()) == pytest.approx(exact, rel=2e-3)


def test_sums_start_anew_and_are_drawn_from_step_name_and_micro_batch():
    def sum_of(name, step, count=3):
        parameter = parameters_of("matrix")
        sums = GradientSums({name: parameter}, seed=0)
        for current in (7, step):  # the first leaves nothing behind
            sums.begin(current)
            for index in range(count):
                backward(parameter, torch.full(SHAPE, 1.0 + index / 128, dtype=torch.bfloat16))
        sums.finish()
        return parameter.grad

    expected = sum_of("a", 1)
    assert float(expected.float().mean()) == pytest.approx(3 + 3 / 128, rel=1e-3)
    assert torch.equal(sum_of("a", 1), expected)
    assert not torch.equal(sum_of("b", 1), expected)
    assert not torch.equal(sum_of("a", 2), expected)
    assert torch.equal(sum_of("a", 1, count=1), sum_of("b", 2, count=1))  # one gradient is not rounded


def test_norms_of_bfloat16_gradients_are_computed_in_float32():
    parameter = nn.Parameter(torch.zeros(1 << 16, 8, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.37)
    exact = float(parameter.grad[0, 0]) * (1 << 19) ** 0.5
    assert gradient_norms({"weight": parameter})["weight"] == pytest.approx(exact, rel=2e-4)
