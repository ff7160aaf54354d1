"""Content hashes, with which peers verify that they hold the same data."""

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
    return hashlib.sha256(text.encode()).hexdigest()
