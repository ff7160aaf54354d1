"""Seeds and digests: stable names for randomness and content."""

import numpy as np

from thinpipe.core.hashing import array_sha256
from thinpipe.core.seeds import derive_seed


def test_seeds_are_stable_and_distinct():
    assert derive_seed(0, "basis") == 5815803845686908278
    assert len({derive_seed("ab"), derive_seed("a", "b"), derive_seed("a", "b", 0), derive_seed("a", "b", "0")}) == 4
    assert all(0 <= derive_seed(number) < 2**63 for number in range(100))


def test_digest_depends_on_bits_shape_and_dtype_but_not_on_byte_order_or_layout():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert array_sha256(array) == array_sha256(array.astype(">f4"))
    assert array_sha256(array) == array_sha256(np.asfortranarray(array))
    others = [array.reshape(3, 2), array.astype(np.float64), array + np.float32(1e-7), -array]
    assert len({array_sha256(other) for other in (array, *others)}) == 5
