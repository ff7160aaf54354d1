"""One way to turn names into seeds, so that no two uses of randomness in a run can collide by accident.

`derive_seed(1234, "blocks", 3, "q_proj")` is a stable 63-bit number on every platform and Python version. The words
are part of the numbers: callers write them as literals, which stay when what they speak of is renamed.
"""

import hashlib


def derive_seed(*words: int | str) -> int:
    """A seed from a path of names. Order matters; `("ab",)` and `("a", "b")` differ."""
    text = "\x1f".join(f"{type(word).__name__}:{word}" for word in words)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
