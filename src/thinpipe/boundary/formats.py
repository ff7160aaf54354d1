"""Number formats: rows of floats to bytes and back, each row by itself.

fp32 and bf16 are the floats' own bytes. int8 and int4 keep the largest magnitude of a row as a bfloat16 scale and the
entries as integers of that scale; int4 puts two in a byte. Decoding gives back float32.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.boundary.lengths import ROWS, RowLength

Uniform = Callable[[torch.Size], Tensor]
"""Numbers in [0, 1) for rounding at random; None in its place rounds to nearest."""


class NumberFormat(Protocol):
    lossless: bool
    """float32 comes back bit for bit."""
    wants_rotation: bool
    """So coarse that one large entry would cost all others their digits."""

    @property
    def row_nbytes(self) -> Callable[[int], int]:
        """Of so many numbers."""
        ...

    def encode(self, values_NW: Tensor, uniform: Uniform | None = None) -> Tensor:
        """uint8, [N, row_nbytes]."""
        ...

    def decode(self, rows: Tensor, width: int) -> Tensor:
        """float32, [N, width]."""
        ...


class FloatFormat:
    """The bytes of a float type."""

    wants_rotation = False

    def __init__(self, dtype: torch.dtype, row: RowLength) -> None:
        self.dtype, self.row_nbytes = dtype, row.nbytes
        self.lossless = dtype == torch.float32

    def encode(self, values_NW: Tensor, uniform: Uniform | None = None) -> Tensor:  # noqa: ARG002
        return values_NW.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, rows: Tensor, width: int) -> Tensor:  # noqa: ARG002
        return rows.contiguous().view(self.dtype).to(torch.float32)


class IntegerFormat:
    """Signed integers of `bits` bits with one scale a row; entries come back within half a scale, or within one."""

    lossless = False

    def __init__(self, row: RowLength) -> None:
        self.bits, self.largest, self.row_nbytes = row.bits, 2 ** (row.bits - 1) - 1, row.nbytes
        self.wants_rotation = row.bits < 8

    def encode(self, values_NW: Tensor, uniform: Uniform | None = None) -> Tensor:
        values_NW = values_NW.float()
        scale_N1 = round_up_to_bf16(values_NW.abs().amax(1, keepdim=True) / self.largest)
        steps_NW = values_NW / torch.where(scale_N1 == 0, 1.0, scale_N1.float())
        whole_NW = steps_NW.round() if uniform is None else (steps_NW + uniform(steps_NW.shape).to(steps_NW)).floor()
        integers_NW = whole_NW.clamp(-self.largest, self.largest).to(torch.int8)
        packed = integers_NW.view(torch.uint8) if self.bits == 8 else _pack_nibbles(integers_NW)
        return torch.cat((scale_N1.view(torch.uint8), packed), dim=1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        scale_N1 = rows[:, :2].flatten().view(torch.bfloat16).float()[:, None]
        packed = rows[:, 2:]
        integers_NW = packed.contiguous().view(torch.int8) if self.bits == 8 else _unpack_nibbles(packed, width)
        return integers_NW.float() * scale_N1


def round_up_to_bf16(scale: Tensor) -> Tensor:
    """The smallest bfloat16 that is not below: the largest entry of a row must still fit."""
    nearest = scale.to(torch.bfloat16)
    upwards = torch.where(nearest < 0, -1, 1).to(torch.int16)
    next_up = (nearest.view(torch.int16) + upwards).view(torch.bfloat16)
    return torch.where(nearest.float() < scale, next_up, nearest)


def _pack_nibbles(integers_NW: Tensor) -> Tensor:
    if integers_NW.shape[1] % 2:
        integers_NW = torch.nn.functional.pad(integers_NW, (0, 1))
    nibbles = integers_NW.view(torch.uint8) & 0xF
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def _unpack_nibbles(packed: Tensor, width: int) -> Tensor:
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)[:, :width].to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


FORMATS: dict[str, NumberFormat] = {
    "fp32": FloatFormat(torch.float32, ROWS["fp32"]),
    "bf16": FloatFormat(torch.bfloat16, ROWS["bf16"]),
    "int8": IntegerFormat(ROWS["int8"]),
    "int4": IntegerFormat(ROWS["int4"]),
}
