"""Derives independent random seeds from names, so that no two uses of randomness in a run share a seed by accident.

`derive_seed(1234, "blocks", 3, "q_proj")` is a stable 63-bit number on every platform and Python version. Changing a
word changes the random numbers: callers pass words as literals and keep them when the thing they name is renamed.
"""

import hashlib


def derive_seed(*words: int | str) -> int:
    """A 63-bit seed from a path of names. Order matters; `("ab",)` and `("a", "b")` differ."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
