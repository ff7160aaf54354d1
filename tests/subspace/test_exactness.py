"""The factored form is the paper's literal form, and a cut changes nothing: the proofs in numbers."""

import pytest
import torch

from tests.reference.exactness import (
    LANGUAGE,
    backward_error,
    gradients_by_hand,
    loss_of,
    round_trip,
    small_config,
    train_literal,
    trajectory,
)
from tests.reference.literal import Failure, LiteralModel
from thinpipe.models import build, materialise

FORMS = [(family, free_last) for family in ("llama", "gpt2") for free_last in (False, True)]


@pytest.mark.parametrize("dim", [256, 1024, 4096])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_boundary_round_trip(dim, dtype, limit):
    assert round_trip(dim, dim // 100, dtype) <= limit


@pytest.mark.parametrize(("steps", "fall"), [(30, 0.2), pytest.param(200, 1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("family", "free_last"), FORMS)
def test_factored_follows_literal_through_two_basis_updates(family, free_last, steps, fall):
    losses = trajectory(family, free_last=free_last, steps=steps, interval=steps * 2 // 5)
    assert losses.largest_difference <= 1e-9
    assert losses.factored[-1] < losses.factored[0] - fall  # it did train


@pytest.mark.parametrize(("family", "free_last"), FORMS)
def test_gradients_upstream_equal_the_uncut_models(family, free_last):
    assert backward_error(family, free_last=free_last) <= 1e-12


@pytest.mark.parametrize(("family", "free_last"), FORMS)
def test_factored_gradients_are_the_literal_ones_in_coordinates(family, free_last):
    """Writers: Uᵀ times the literal gradient; embeddings: the literal gradient times U; all others equal."""
    model = materialise(build(small_config(family, free_last=free_last)), seed=11, dtype=torch.float64)
    literal = LiteralModel(model)
    ids = LANGUAGE.batch(1, 8, 32)
    factored = gradients_by_hand(model, ids)
    loss_of(literal.forward(ids[:, :-1]), ids).backward()
    for name, parameter in literal.dense.named_parameters():
        gradient = parameter.grad
        axis = literal.confined.get(name)
        if axis is not None:
            gradient = literal.U.T @ gradient if axis == 0 else gradient @ literal.U
        torch.testing.assert_close(factored[name], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_rowwise_adamw_keeps_the_literal_form_in_the_subspace(dtype, limit, steps):
    assert train_literal(dtype, steps=steps).drift <= limit


def test_ordinary_adamw_leaves_the_subspace():
    run = train_literal(torch.float32, steps=100, failure=Failure(ordinary_adamw=True))
    assert run.drift > 0.1
    # The boundary is no longer lossless: the same weights compute another function when they are not cut.
    assert abs(run.uncut_losses[99] - run.losses[99]) > 0.005


@pytest.mark.long
@pytest.mark.parametrize(("steps", "lost"), [(150, 0.3), (400, 1.2)])
def test_boundary_without_the_fixed_table_loses_the_tokens(steps, lost):
    right, wrong = (
        train_literal(torch.float32, steps=steps, failure=failure)
        for failure in (Failure(), Failure(fixed_not_subtracted=True))
    )
    assert abs(right.uncut_losses[steps - 1] - right.losses[-1]) < 1e-4
    assert sum(wrong.losses[-50:]) / 50 > sum(right.losses[-50:]) / 50 + lost
