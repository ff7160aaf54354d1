"""sha256 of arrays and texts in memory, with which hub and peers verify that they have the same basis, frozen tables,
tokenizer and settings. For files see `file_sha256` in files.py."""

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt


def array_sha256(array: npt.NDArray[Any]) -> str:
    """sha256 over dtype, shape and little-endian bytes: equal exactly when the arrays are equal bit for bit."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    header = f"{little.dtype.name}{tuple(little.shape)}".encode()
    return hashlib.sha256(header + little.tobytes()).hexdigest()


def text_sha256(text: str) -> str:
    """sha256 of the UTF-8 bytes of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
