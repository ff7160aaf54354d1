"""Where the tensors of a safetensors file lie, from its header alone. Imports no torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from thinpipe.core.errors import UserError

_MAX_HEADER_NBYTES = 100_000_000
ITEM_BITS = {
    "F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""Bits of a number by its type's name in safetensors files."""


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """A tensor in a file."""

    path: Path
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""
    nbytes: int


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """The tensors of a file by name. Raises UserError if it is no safetensors file, or not whole."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_NBYTES:
                raise UserError(f"{path} is no safetensors file: download it again")
            header, nbytes = json.loads(file.read(length)), file.seek(0, 2)
        places = {
            name: TensorPlace(
                path=path,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                offset=8 + length + entry["data_offsets"][0],
                nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is no safetensors file ({error}): download it again") from error
    if any(place.offset + place.nbytes > nbytes for place in places.values()):
        raise UserError(f"{path} is not whole: download it again")
    return places


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this type and shape."""
    return math.prod(shape) * ITEM_BITS[dtype] // 8


def create_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, TensorPlace]:
    """Creates a file that holds these tensors (type, as safetensors names it, and shape), all zero, and says where to
    write their bytes: for tensors that are too large to be in memory together."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + tensor_nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)  # so that tensors are aligned
    with path.open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)
    return tensor_places(path)
