"""RowwiseAdamW: AdamW for ordinary parameters, the paper's rule for coordinates, a well-behaved torch optimiser."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thinpipe.optim import RowwiseAdamW
from thinpipe.subspace.parameter_tags import mark_coordinates


def coordinates(*shape, axis, full_width=64):
    parameter = nn.Parameter(torch.randn(*shape, dtype=torch.float64))
    mark_coordinates(parameter, axis=axis, full_width=full_width)
    return parameter


def feed(optimizer, gradients):
    for gradient in gradients:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = gradient.to(parameter.dtype).expand_as(parameter).clone()
        optimizer.step()


@pytest.mark.parametrize("second_moment", ["row", "element"])
def test_ordinary_parameters_are_torch_adamw_bit_for_bit(second_moment):
    ours, theirs = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(3, 5))
    settings_ = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    gradients = torch.randn(20, 3, 5)
    feed(RowwiseAdamW([ours], second_moment=second_moment, **settings_), gradients)
    feed(torch.optim.AdamW([theirs], fused=True, **settings_), gradients)
    assert torch.equal(ours, theirs)


def test_plain_adamw_on_coordinates_is_an_option():
    ours = coordinates(4, 7, axis=0)
    theirs = nn.Parameter(ours.detach().clone())
    gradients = torch.randn(10, 4, 7)
    feed(RowwiseAdamW([ours], lr=0.01, weight_decay=0.1, second_moment="element"), gradients)
    feed(torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True), gradients)
    assert torch.equal(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 8), features=st.integers(1, 9), axis=st.sampled_from([0, 1]), seed=st.integers(0, 99))
def test_a_row_is_only_scaled_so_the_update_commutes_with_rotations(width, features, axis, seed):
    """Rotating coordinates and gradients rotates the trajectory: true for one moment per row, false for AdamW."""
    torch.manual_seed(seed)
    shape = (width, features) if axis == 0 else (features, width)
    plain = coordinates(*shape, axis=axis)
    rotation = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q

    def rotate(x):
        return rotation @ x if axis == 0 else x @ rotation.T

    turned = nn.Parameter(rotate(plain.detach()))
    mark_coordinates(turned, axis=axis, full_width=64)
    gradients = torch.randn(10, *shape, dtype=torch.float64)
    feed(RowwiseAdamW([plain], lr=0.05), gradients)
    feed(RowwiseAdamW([turned], lr=0.05), [rotate(gradient) for gradient in gradients])
    torch.testing.assert_close(turned.detach(), rotate(plain.detach()), rtol=1e-10, atol=1e-10)


def test_the_second_moment_is_the_mean_over_the_full_width():
    parameter = coordinates(4, 7, axis=0, full_width=64)
    optimizer = RowwiseAdamW([parameter], betas=(0.9, 0.0))
    gradient = torch.randn(4, 7, dtype=torch.float64)
    feed(optimizer, [gradient])
    moment = optimizer.state[parameter]["exp_avg_sq"]
    assert moment.shape == (1, 7)
    torch.testing.assert_close(moment[0], gradient.square().sum(0) / 64)


def test_a_writer_bias_has_one_second_moment():
    bias = coordinates(6, axis=0)
    optimizer = RowwiseAdamW([bias])
    feed(optimizer, [torch.randn(6)])
    assert optimizer.state[bias]["exp_avg_sq"].shape == (1,)


def test_decoupled_weight_decay_scales_and_groups_keep_their_own():
    decayed, kept = coordinates(4, 7, axis=0), coordinates(4, 7, axis=0)
    before = decayed.detach().clone(), kept.detach().clone()
    optimizer = RowwiseAdamW([{"params": [decayed]}, {"params": [kept], "weight_decay": 0.0}], lr=0.1, weight_decay=0.5)
    feed(optimizer, [torch.zeros(1)])
    torch.testing.assert_close(decayed.detach(), before[0] * (1 - 0.05))
    assert torch.equal(kept.detach(), before[1])


@pytest.mark.parametrize("second_moment", ["row", "element"])
def test_state_dict_resumes_bit_for_bit(second_moment):
    gradients = torch.randn(20, 1)
    straight = [coordinates(4, 7, axis=0), nn.Parameter(torch.randn(5, dtype=torch.float64))]
    resumed = copy.deepcopy(straight)
    resumed[0].thinpipe_coordinates = straight[0].thinpipe_coordinates
    feed(RowwiseAdamW(straight, lr=0.01, second_moment=second_moment), gradients)
    first = RowwiseAdamW(resumed, lr=0.01, second_moment=second_moment)
    feed(first, gradients[:10])
    second = RowwiseAdamW(resumed, lr=99.0)
    second.load_state_dict(first.state_dict())
    feed(second, gradients[10:])
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_learning_rate_schedulers_drive_it():
    parameter = coordinates(2, 2, axis=0)
    optimizer = RowwiseAdamW([parameter], lr=1.0, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
    feed(optimizer, [torch.ones(1)])
    schedule.step()
    after_one = parameter.detach().clone()
    feed(optimizer, [torch.ones(1)])
    assert torch.equal(parameter.detach(), after_one)


def test_closure_and_missing_gradients():
    used, unused = coordinates(2, 2, axis=0), coordinates(2, 2, axis=0)
    optimizer = RowwiseAdamW([used, unused])

    def closure():
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss.item()

    before = used.square().sum().item()
    assert optimizer.step(closure) == before
    assert used.square().sum().item() < before
    assert unused not in optimizer.state or not optimizer.state[unused]


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"second_moment": "column"}])
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ValueError, match=r"out of range|second_moment"):
        RowwiseAdamW([coordinates(2, 2, axis=0)], **wrong)
