"""Number formats of what replicas send each other at a merge: float32, or integers of 4 or 8 bits with a scale for each
block of numbers.

Both ends compute on the CPU in float32, one operation at a time, so that all machines decode the same bits.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from thinpipe.boundary.packing import pack_nibbles, unpack_nibbles
from thinpipe.core.errors import UserError

NumberFormat = Literal["fp32", "int8", "int4"]
BLOCK = 256
"""Numbers that share a scale: 4 bytes for 256 numbers, so int4 takes 0.516 bytes a number."""
_LARGEST = {"int8": 127, "int4": 7}
_SCALES = ":scale"


_MAX = 1e20
"""Largest scale or number: thousands of them, times thousands of samples, are far from the largest float32."""


class FormatError(UserError):
    """Encoded numbers are not what they should be: of another machine, or of a replica that has diverged."""


def encode(values: Mapping[str, Tensor], form: NumberFormat) -> dict[str, Tensor]:
    """Tensors by name, as tensors to store: each by its name, and the scales of its blocks."""
    encoded: dict[str, Tensor] = {}
    for name, value in values.items():
        encoded |= {name + key: tensor for key, tensor in _encode(value.float(), form).items()}
    return encoded


def decode(encoded: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], form: NumberFormat) -> dict[str, Tensor]:
    """Tensors of these shapes in float32. Raises FormatError if `encoded` does not hold exactly these, or holds what is
    not finite."""
    check(encoded, shapes, form)
    return {name: _decode(encoded, name, shape, form) for name, shape in shapes.items()}


def check(encoded: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], form: NumberFormat) -> None:
    """Raises FormatError if `encoded` does not hold exactly tensors of these shapes, or has numbers that cannot be
    added."""
    expected = {name + key: kind for name, shape in shapes.items() for key, kind in layout(shape, form).items()}
    if missing := expected.keys() ^ encoded.keys():
        raise FormatError(f"there is more or less than the tensors of this layer ({min(missing)[:80]})")
    for name, (dtype, shape) in expected.items():
        if (encoded[name].dtype, encoded[name].shape) != (dtype, shape):
            raise FormatError(f"{name} is {encoded[name].dtype} {list(encoded[name].shape)}, not {dtype} {list(shape)}")
        if dtype == torch.float32 and not (encoded[name].abs() <= _MAX).all():  # NaN is not
            raise FormatError(f"{name} is not finite, or has numbers above {_MAX:g}")


def _encode(value: Tensor, form: NumberFormat) -> dict[str, Tensor]:
    if form == "fp32":
        return {"": value}
    blocks = torch.nn.functional.pad(value.flatten(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / _LARGEST[form]
    largest = float(_LARGEST[form])
    levels = (blocks / torch.where(scales == 0, 1.0, scales)).round()
    integers = levels.clamp(-largest, largest).to(torch.int8)  # of denormals it would be more
    return {"": pack_nibbles(integers) if form == "int4" else integers, _SCALES: scales.flatten()}


def _decode(encoded: Mapping[str, Tensor], name: str, shape: torch.Size, form: NumberFormat) -> Tensor:
    stored = encoded[name]
    if form == "fp32":
        return stored
    if form == "int4":
        stored = (unpack_nibbles(stored, BLOCK) ^ 8).to(torch.int8) - 8
    values = stored.float() * encoded[name + _SCALES].unsqueeze(1)
    return values.flatten()[: shape.numel()].view(shape)


def layout(shape: torch.Size, form: NumberFormat) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Type and shape of what a tensor becomes, by what its name gets at the end."""
    if form == "fp32":
        return {"": (torch.float32, shape)}
    blocks = -(-shape.numel() // BLOCK)
    packed = (torch.uint8, BLOCK // 2) if form == "int4" else (torch.int8, BLOCK)
    return {"": (packed[0], torch.Size((blocks, packed[1]))), _SCALES: (torch.float32, torch.Size((blocks,)))}
