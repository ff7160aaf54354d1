"""Pseudo-random permutation of 0 ... N-1, computed per position in O(1) memory instead of stored.

A Feistel network over pairs of digits (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002): each round
adds a hash of one digit to the other one, which is invertible, so the whole is a bijection. Integer arithmetic only,
hence the same order on every platform. Not cryptographically secure.
"""

import math

import numpy as np
import numpy.typing as npt

from thinpipe.core.seeds import derive_seed

_ROUNDS = 8


class Permutation:
    """A pseudo-random bijection of range(size), chosen by the key."""

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"the size of a permutation must lie between 1 and 2**62, not at {size}")
        self.size = size
        # x = high * radix + low. The digits span fewer than `radix` values beyond `size`, so that cycle walking is rare
        # (less than once in sqrt(size)).
        self._radix = math.isqrt(size - 1) + 1
        self._high_size = -(-size // self._radix)
        self._round_keys = [derive_seed(key, "feistel", index) for index in range(_ROUNDS)]

    def __call__(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The items at these positions of the shuffled order."""
        if positions.size and not (positions.min() >= 0 and positions.max() < self.size):
            raise IndexError(f"positions {positions.min()} to {positions.max()} do not lie in 0 ... {self.size - 1}")
        items = self._permute(positions.astype(np.uint64))
        # Cycle walking: a bijection of a superset, repeated until the value is below `size`, is a bijection of
        # range(size).
        while (outside := items >= self.size).any():
            items[outside] = self._permute(items[outside])
        return items.astype(np.int64)

    def _permute(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        radix, high_size = np.uint64(self._radix), np.uint64(self._high_size)
        high, low = values // radix, values % radix
        for index, key in enumerate(self._round_keys):
            if index % 2:
                high = (high + _mix(low, key) % high_size) % high_size
            else:
                low = (low + _mix(high, key) % radix) % radix
        return high * radix + low


def _mix(values: npt.NDArray[np.uint64], key: int) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every output bit depends on every input bit. Wraps modulo 2^64."""
    values = values ^ np.uint64(key)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
