"""T_fixed: portable bits, no float table, one definition."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.subspace import FIXED_TABLES, GaussianTable, SignTable
from thinpipe.subspace.fixed_tables import GivenTable

DRAWN = [kind for kind in FIXED_TABLES if kind != "given"]


def test_signs_are_the_same_bits_on_every_platform():
    table = SignTable(1000, 200, std=0.02, seed=7)
    assert (
        hashlib.sha256(table.bits.numpy().tobytes()).hexdigest()
        == "0dcb32dd138a79e01e98a60b6a46688f1022631dddfd4982864f00e87a6cd19b"
    )


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 50), dim=st.integers(1, 300), seed=st.integers(0, 2**62))
def test_every_entry_is_the_bit_the_docstring_names(rows, dim, seed):
    table = SignTable(rows, dim, std=0.5, seed=seed)
    got = table(torch.arange(rows), torch.float64)
    assert got.shape == (rows, dim)
    bits = np.unpackbits(table.bits.numpy(), axis=1, bitorder="little")[:, :dim]
    np.testing.assert_array_equal(got.numpy(), (bits.astype(float) * 2 - 1) * 0.5)


def test_a_row_does_not_depend_on_the_number_of_rows():
    few, many = (SignTable(rows, 100, std=1.0, seed=1) for rows in (10, 1000))
    assert torch.equal(few.bits, many.bits[:10])


def test_signs_are_balanced_and_rows_uncorrelated():
    rows = SignTable(512, 512, std=1.0, seed=3)(torch.arange(512), torch.float64)
    assert abs(float(rows.mean())) < 4 / 512  # four standard errors
    overlap = rows @ rows.T / 512 - torch.eye(512)
    assert float(overlap.abs().max()) < 6 / 512**0.5
    assert torch.linalg.matrix_rank(rows) == 512  # high rank is what the table is for


def test_a_large_sign_table_takes_one_bit_an_entry():
    table = SignTable(128_256, 4096, std=0.02, seed=0)
    stored = sum(buffer.nbytes for buffer in table.buffers())
    assert stored == 128_256 * 4096 // 8 + 256 * 8


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scale_dtype_and_lookup(kind, dtype):
    table = FIXED_TABLES[kind](300, 128, std=0.02, seed=1)
    ids = torch.tensor([[5, 5, 299], [0, 1, 2]])
    rows = table(ids, dtype)
    assert rows.shape == (2, 3, 128)
    assert rows.dtype == dtype
    assert torch.equal(rows[0, 0], rows[0, 1])
    assert not torch.equal(rows[0, 0], rows[1, 0])
    assert float(table(torch.arange(300), torch.float32).std()) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("kind", DRAWN)
def test_hash_tells_content_and_scale_apart(kind):
    make = FIXED_TABLES[kind]
    same, again = make(50, 64, std=0.02, seed=1), make(50, 64, std=0.02, seed=1)
    assert same.hash == again.hash
    assert make(50, 64, std=0.02, seed=2).hash != same.hash
    assert make(50, 64, std=0.03, seed=1).hash != same.hash
    again.content().view(torch.uint8)[3, 3] ^= 1
    assert again.hash != same.hash


def test_a_float_table_is_shipped_and_a_sign_table_is_not():
    assert list(GaussianTable(4, 8, std=1.0, seed=0).state_dict()) == ["table"]
    assert list(GivenTable(4, 8, std=1.0, seed=0).state_dict()) == ["table"]
    assert list(SignTable(4, 8, std=1.0, seed=0).state_dict()) == []


def test_a_given_table_is_nan_until_it_is_given():
    table = GivenTable(4, 8, std=1.0, seed=0)
    empty = table.hash
    assert table(torch.tensor([1]), torch.float64).isnan().all()
    rows = torch.arange(32.0).view(4, 8)
    table.load_state_dict({"table": rows})
    assert torch.equal(table(torch.tensor([[3, 1]]), torch.float64), rows[[3, 1]].double()[None])
    assert table.hash != empty


def test_a_gaussian_table_does_not_depend_on_the_dtype():
    single, double = GaussianTable(9, 8, std=1.0, seed=0), GaussianTable(9, 8, std=1.0, seed=0)
    double.table = torch.empty(9, 8, dtype=torch.float64)
    double.fill()
    assert torch.equal(single.table.double(), double.table)
