"""The shuffle is a bijection at every size, the same on every platform, and looks random."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.core.seeds import derive_seed
from thinpipe.data.permutation import Permutation

MASK = 2**64 - 1
keys = st.integers(0, 2**63 - 1)


def mix(value: int, key: int) -> int:
    value ^= key
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def slow_permutation(size: int, key: int, position: int, *, backwards: bool = False) -> int:
    """The definition, in Python integers; and its inverse, which is the proof that it is a bijection."""
    radix = math.isqrt(size - 1) + 1
    high_size = math.ceil(size / radix)
    sign = -1 if backwards else 1
    while True:
        high, low = divmod(position, radix)
        for index in range(8)[::sign]:
            round_key = derive_seed(key, "feistel", index)
            if index % 2:
                high = (high + sign * mix(low, round_key)) % high_size
            else:
                low = (low + sign * mix(high, round_key)) % radix
        position = high * radix + low
        if position < size:
            return position


def full(size: int, key: int) -> np.ndarray:
    return Permutation(size, key)(np.arange(size))


@settings(deadline=None)
@given(st.integers(1, 3000), keys)
def test_every_item_comes_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(full(size, key)), np.arange(size))


@settings(deadline=None)
@given(st.data(), st.integers(1, 10**12), keys)
def test_equals_the_slow_twin_and_can_be_undone(data: st.DataObject, size: int, key: int) -> None:
    position = data.draw(st.integers(0, size - 1))
    item = Permutation(size, key)(np.array([position])).tolist()[0]
    assert item == slow_permutation(size, key, position)
    assert slow_permutation(size, key, item, backwards=True) == position


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 3000), keys)
def test_any_position_alone_gives_the_same_item(size: int, key: int) -> None:
    whole, position = full(size, key), size // 3
    assert Permutation(size, key)(np.array([position]))[0] == whole[position]


def test_keys_give_different_orders() -> None:
    orders = {tuple(full(50, key).tolist()) for key in range(200)}
    assert len(orders) == 200


def test_the_order_is_frozen() -> None:
    """A change here would silently change the data order of every run that is resumed."""
    assert full(10, 1234).tolist() == [4, 3, 2, 9, 7, 1, 6, 5, 0, 8]
    items = Permutation(10**9, 1234)(np.array([0, 1, 2, 10**9 - 1]))
    assert items.tolist() == [493476904, 590264676, 652733600, 762988451]


def test_each_position_gets_each_item_equally_often() -> None:
    """Chi-square over many keys: its mean is size (size - 1), and the bound lies five deviations above."""
    size, tries = 11, 5_000
    counts = np.zeros((size, size))
    for key in range(tries):
        counts[np.arange(size), full(size, key)] += 1
    expected = tries / size
    mean = size * (size - 1)
    assert ((counts - expected) ** 2 / expected).sum() < mean + 5 * math.sqrt(2 * mean)


def test_neighbours_do_not_stay_together() -> None:
    order = full(100_000, 7)
    steps = np.diff(order)
    assert np.mean(np.abs(steps) < 1000) < 0.03  # 2 % for a random order
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert len({right - left for left, right in pairwise(order[:2000].tolist())}) > 1900


@pytest.mark.parametrize("position", [-1, 5])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"0 \.\.\. 4"):
        Permutation(5, 0)(np.array([position]))


@pytest.mark.parametrize("size", [0, -3, 2**63])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=r"between 1 and 2\*\*62"):
        Permutation(size, 0)
