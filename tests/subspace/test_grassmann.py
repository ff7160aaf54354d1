"""The basis update: the right direction, the right mapping, an honest report. geoopt is the oracle for the manifold."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from thinpipe.optim import RowwiseAdamW
from thinpipe.subspace import Basis, GrassmannTracker, rebase_squares
from thinpipe.subspace.grassmann import captured_energy, descent_direction, principal_angles
from thinpipe.subspace.parameter_tags import mark_coordinates

D, K = 24, 4


def random_basis(seed, version=0):
    return Basis(Basis.random(D, K, seed=seed, dtype=torch.float64).matrix_DK, version)


def gradients(seed, count=3):
    generator = torch.Generator().manual_seed(seed)
    scale = torch.linspace(3, 0.1, D, dtype=torch.float64)
    return [torch.randn(2, 5, D, generator=generator, dtype=torch.float64) * scale for _ in range(count)]


def lost_energy(basis_DK, observed):
    return sum((g - g @ basis_DK @ basis_DK.T).square().sum() for g in observed)


def test_direction_is_minus_the_riemannian_gradient_of_the_lost_energy():
    basis, observed = random_basis(1), gradients(2)
    tracker = GrassmannTracker(basis)
    for gradient in observed:
        tracker.observe(gradient)
    point = basis.matrix_DK.clone().requires_grad_()
    lost_energy(point, observed).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # geoopt imports deprecated parts of torch
        import geoopt
    # On horizontal vectors, and this one is horizontal, Stiefel's Euclidean metric is Grassmann's.
    oracle = geoopt.Stiefel(canonical=False).egrad2rgrad(point.detach(), point.grad)
    trace = sum(g.square().sum() for g in observed)
    direction = descent_direction(basis.matrix_DK, tracker.su_DK, tracker.trace)
    torch.testing.assert_close(direction, -oracle / trace, rtol=1e-10, atol=1e-12)
    assert float((basis.matrix_DK.T @ direction).abs().max()) < 1e-14


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), step_size=st.floats(1e-3, 0.5))
def test_a_step_captures_more_energy_and_stays_orthonormal(seed, step_size):
    basis, observed = random_basis(seed), gradients(seed + 1)
    tracker = GrassmannTracker(basis, step_size=step_size)
    for gradient in observed:
        tracker.observe(gradient)
    new = tracker.propose()
    assert new.version == basis.version + 1
    assert new.orthonormality_error < 1e-13
    assert lost_energy(new.matrix_DK, observed) <= lost_energy(basis.matrix_DK, observed) * (1 + 1e-12)


def test_many_steps_find_the_principal_subspace():
    observed = gradients(3, count=20)
    tracker = GrassmannTracker(random_basis(4), step_size=2.0)
    for _ in range(300):
        for gradient in observed:
            tracker.observe(gradient)
        tracker.update(lambda _old, _new: 1.0)
    stacked = torch.cat([g.flatten(0, 1) for g in observed])
    best_DK = torch.linalg.svd(stacked, full_matrices=False).Vh[:K].T
    assert float(principal_angles(tracker.basis.matrix_DK, best_DK).max()) < 1e-3


def test_captured_energy_is_what_is_not_lost():
    basis, observed = random_basis(1), gradients(2)
    tracker = GrassmannTracker(basis)
    for gradient in observed:
        tracker.observe(gradient)
    share = 1 - lost_energy(basis.matrix_DK, observed) / sum(g.square().sum() for g in observed)
    assert captured_energy(basis.matrix_DK, tracker.su_DK, tracker.trace) == pytest.approx(float(share), rel=1e-12)


@pytest.mark.parametrize("angle", [1e-9, 1e-4, 0.3, 1.2, math.pi / 2])
def test_principal_angles_of_a_known_turn(angle):
    first = torch.eye(D, K, dtype=torch.float64)
    second = first.clone()
    second[0, 0], second[K, 0] = math.cos(angle), math.sin(angle)
    angles = principal_angles(first, second)
    torch.testing.assert_close(
        angles, torch.tensor([0.0] * (K - 1) + [angle], dtype=torch.float64), rtol=1e-6, atol=1e-12
    )


def marked(shape, axis):
    parameter = nn.Parameter(torch.randn(*shape, dtype=torch.float64))
    mark_coordinates(parameter, axis=axis, full_width=D)
    return parameter


def test_rebase_maps_coordinates_and_first_moments_like_a_full_width_projection():
    old, new = random_basis(1), random_basis(2, version=1)
    residual_writer, bias, embedding = marked((K, 7), 0), marked((K,), 0), marked((9, K), 1)
    reader = nn.Parameter(torch.randn(D, 3, dtype=torch.float64))
    parameters = [residual_writer, bias, embedding, reader]
    optimizer = RowwiseAdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    before = {p: p.detach().clone() for p in parameters}
    moments = {p: optimizer.state[p]["exp_avg"].clone() for p in parameters}
    seconds = {p: optimizer.state[p]["exp_avg_sq"].clone() for p in parameters}
    squares = rebase_squares({str(index): p for index, p in enumerate(parameters)}, optimizer, old, new)
    u, projector = old.matrix_DK, new.matrix_DK @ new.matrix_DK.T
    for values, expected_from in (
        ({p: p.detach() for p in parameters}, before),
        ({p: optimizer.state[p]["exp_avg"] for p in parameters}, moments),
    ):
        for column in (residual_writer, bias):
            torch.testing.assert_close(new.matrix_DK @ values[column], projector @ (u @ expected_from[column]))
        torch.testing.assert_close(values[embedding] @ new.matrix_DK.T, expected_from[embedding] @ u.T @ projector)
        assert torch.equal(values[reader], expected_from[reader])
    assert all(torch.equal(optimizer.state[p]["exp_avg_sq"], seconds[p]) for p in parameters)
    assert squares.keys() == {"0", "1", "2"}
    for name, (square_before, square_after) in squares.items():
        parameter = parameters[int(name)]
        assert square_before == pytest.approx(float(before[parameter].square().sum()))
        assert square_after == pytest.approx(float(parameter.detach().square().sum()))
        assert square_after < square_before


def test_element_wise_second_moments_restart_from_their_mean():
    old, new = random_basis(1), random_basis(2)
    residual_writer = marked((K, 7), 0)
    optimizer = RowwiseAdamW([residual_writer], second_moment="element")
    residual_writer.grad = torch.randn_like(residual_writer)
    optimizer.step()
    mean = optimizer.state[residual_writer]["exp_avg_sq"].mean(0, keepdim=True)
    rebase_squares({"writer": residual_writer}, optimizer, old, new)
    assert torch.equal(optimizer.state[residual_writer]["exp_avg_sq"], mean.expand(K, 7))


def test_update_reports_and_begins_a_new_interval():
    tracker = GrassmannTracker(random_basis(1), step_size=0.5)
    for gradient in gradients(2):
        tracker.observe(gradient)
    losses = iter([2.0, 2.5])
    seen = []
    report = tracker.update(lambda old, new: seen.append((old.version, new.version)) or 0.9, lambda: next(losses))
    assert seen == [(0, 1)]
    assert (report.version, report.kept_norm, report.loss_before, report.loss_after) == (1, 0.9, 2.0, 2.5)
    assert 0 < report.captured_energy < 1
    assert 0 < report.mean_angle <= report.largest_angle < math.pi / 2
    assert report.orthonormality_error < 1e-13
    assert float(tracker.trace) == 0
    assert tracker.basis.version == 1


def test_without_gradients_or_step_the_basis_stays():
    basis = random_basis(1)
    assert torch.equal(GrassmannTracker(basis).propose().matrix_DK, basis.matrix_DK)
    still = GrassmannTracker(basis, step_size=0.0)
    still.observe(gradients(2)[0])
    torch.testing.assert_close(still.propose().matrix_DK, basis.matrix_DK, rtol=0, atol=1e-14)
