"""The basis: orthonormal, named by version and hash."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.subspace import Basis
from thinpipe.subspace.basis import orthonormalise


@settings(max_examples=25, deadline=None)
@given(dim=st.integers(1, 200), share=st.floats(0.01, 1.0), seed=st.integers(0, 2**31))
def test_random_basis_is_orthonormal(dim, share, seed):
    width = max(1, int(dim * share))
    assert Basis.random(dim, width, seed=seed, dtype=torch.float64).orthonormality_error < 1e-13
    assert Basis.random(dim, width, seed=seed).orthonormality_error < 1e-6


def test_orthonormalise_leaves_a_basis_alone_and_is_continuous():
    basis_DK = Basis.random(64, 8, seed=1, dtype=torch.float64).matrix_DK
    torch.testing.assert_close(orthonormalise(basis_DK), basis_DK, rtol=0, atol=1e-14)
    torch.testing.assert_close(orthonormalise(basis_DK + 1e-9), basis_DK, rtol=0, atol=1e-7)


def test_hash_notices_one_bit_a_sign_and_a_rotation():
    basis = Basis.random(64, 8, seed=1)
    assert basis.hash == Basis.random(64, 8, seed=1).hash
    flipped, negated = basis.matrix_DK.clone(), basis.matrix_DK.clone()
    flipped.view(torch.int32)[0, 0] ^= 1
    negated[:, 0] *= -1
    rotated = basis.matrix_DK @ Basis.random(8, 8, seed=2).matrix_DK
    hashes = {Basis(matrix).hash for matrix in (basis.matrix_DK, flipped, negated, rotated)}
    assert len(hashes) == 4


def test_a_wide_matrix_is_no_basis():
    with pytest.raises(ValueError, match="tall D x K"):
        Basis(torch.zeros(3, 4))
