"""Streams and spaces: what a block reads and writes, and what a boundary carries."""

import pytest
import torch

from thinpipe.subspace import (
    Basis,
    DenseSpace,
    DenseStream,
    FreeSpace,
    SignTable,
    Subspace,
    SubspaceStream,
    coordinates_of,
)


@pytest.fixture
def subspace():
    space = Subspace(32, 4, seed=1, tokens=SignTable(50, 32, std=0.02, seed=1))
    space.basis_DK = Basis.random(32, 4, seed=1, dtype=torch.float64).matrix_DK
    return space


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_what_is_added_to_a_subspace_stream_stays_in_the_subspace(subspace):
    stream = subspace.open(IDS, torch.randn(2, 3, 4, dtype=torch.float64))
    for _ in range(5):
        stream = stream.add(torch.randn(2, 3, 4, dtype=torch.float64))
    inside = stream.dense() - subspace.base(IDS, torch.float64)
    projector = subspace.basis_DK @ subspace.basis_DK.T
    torch.testing.assert_close(inside @ projector, inside, rtol=0, atol=1e-13)
    torch.testing.assert_close(inside @ subspace.basis_DK, stream.state, rtol=0, atol=1e-13)


def test_the_full_width_subspace_is_the_dense_stream():
    basis_DK, base = torch.eye(8, dtype=torch.float64), torch.zeros(1, 2, 8, dtype=torch.float64)
    state, written = torch.randn(1, 2, 8, dtype=torch.float64), torch.randn(1, 2, 8, dtype=torch.float64)
    confined = SubspaceStream(state, base, basis_DK).add(written)
    assert torch.equal(confined.dense(), DenseStream(state).add(written).dense())


def test_positions_are_added_to_the_base():
    tokens, positions = SignTable(50, 32, std=0.02, seed=1), SignTable(9, 32, std=0.02, seed=2)
    space = Subspace(32, 4, seed=1, tokens=tokens, positions=positions)
    expected = tokens(IDS, torch.float32) + positions(torch.arange(3), torch.float32)
    assert torch.equal(space.base(IDS, torch.float32), expected)


def test_writers_and_embeddings_carry_the_mark_only_in_a_subspace(subspace):
    residual_writer, embedding = subspace.residual_writer(16, bias=True), subspace.embedding(50)
    assert residual_writer.weight.shape == (4, 16)
    assert (coordinates_of(residual_writer.weight).axis, coordinates_of(residual_writer.bias).axis) == (0, 0)
    assert (coordinates_of(embedding.weight).axis, coordinates_of(embedding.weight).full_width) == (1, 32)
    for space in (DenseSpace(32), FreeSpace(subspace)):
        assert space.residual_writer(16).weight.shape == (32, 16)
        assert coordinates_of(space.residual_writer(16).weight) is None


@pytest.mark.parametrize("free", [False, True])
def test_the_observer_sees_the_whole_gradient_at_the_input(subspace, free):
    """Against a dense stream that starts from the same D-wide vector: what autograd says about that vector."""
    state = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    readers = torch.randn(3, 32, 32, dtype=torch.float64) / 6
    writers = torch.randn(3, 32, 4, dtype=torch.float64) / 6

    def run(stream, write):
        for reader, residual_writer in zip(readers, writers, strict=True):
            stream = stream.add(torch.tanh(stream.dense() @ reader) @ write(residual_writer))
        return stream.dense().square().sum()

    seen = []
    space = FreeSpace(subspace) if free else subspace
    expand = subspace.basis_DK.T
    run(space.open(IDS, state, seen.append), lambda w: w @ expand if free else w).backward()
    whole = (state.detach() @ expand + subspace.base(IDS, torch.float64)).requires_grad_()
    run(DenseStream(whole), lambda w: w @ expand).backward()
    (gradient,) = seen
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state.grad, gradient @ subspace.basis_DK, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("free", [False, True])
def test_the_observer_sees_a_backward_pass_for_inputs_alone(subspace, free):
    """Zero-bubble schedules compute the gradient of a stage's input first and that of its weights later."""
    space = FreeSpace(subspace) if free else subspace
    whole, split = [], []
    for seen in (whole, split):
        state = torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)
        loss = space.open(IDS, state, seen.append).dense().square().sum()
        if seen is whole:
            loss.backward()
        else:
            torch.autograd.grad(loss, state)
    assert len(split) == 1
    assert torch.equal(split[0], whole[0])


def test_setting_a_basis_does_not_change_the_copy_someone_holds(subspace):
    old, old_hash = subspace.basis, subspace.basis.hash
    subspace.basis = Basis(Basis.random(32, 4, seed=9, dtype=torch.float64).matrix_DK, version=1)
    assert old.hash == old_hash
    assert (subspace.basis.version, subspace.basis.hash == old_hash) == (1, False)
