"""Number formats: encode rows of floats as bytes, each row independently, and decode them to float32.

fp32 and bf16 are the floats' own bytes. int8 and int4 store one bfloat16 scale per row, the row's largest magnitude
divided by 127 (int8) or 7 (int4) and rounded up, and the entries as integer multiples of the scale; int4 packs two
entries into a byte.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from thinpipe.boundary.packing import pack_nibbles, unpack_nibbles
from thinpipe.boundary.sizes import ROW_SIZES, RowSize

UniformSampler = Callable[[Tensor], Tensor]
"""Function from a tensor to random numbers in [0, 1) of its shape and on its device, for stochastic rounding. Where
None is passed instead, values are rounded to nearest."""


class NumberFormat(Protocol):
    lossless: bool
    """Whether float32 values are restored bit for bit."""
    wants_rotation: bool
    """Whether rows should be rotated first, because the format is so coarse that one outlier ruins the whole row."""

    @property
    def row_nbytes(self) -> Callable[[int], int]:
        """Bytes of an encoded row, as a function of the row's width."""
        ...

    def encode(self, values_NW: Tensor, uniform: UniformSampler | None = None) -> Tensor:
        """[N, W] to uint8 [N, row_nbytes(W)]."""
        ...

    def decode(self, rows: Tensor, width: int) -> Tensor:
        """uint8 [N, row_nbytes(width)] to float32 [N, width]."""
        ...


class FloatFormat:
    """Values as the bytes of a floating-point type."""

    wants_rotation = False

    def __init__(self, dtype: torch.dtype, row: RowSize) -> None:
        self.dtype, self.row_nbytes = dtype, row.nbytes
        self.lossless = dtype == torch.float32

    def encode(self, values_NW: Tensor, uniform: UniformSampler | None = None) -> Tensor:  # noqa: ARG002
        return values_NW.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, rows: Tensor, width: int) -> Tensor:  # noqa: ARG002
        return rows.contiguous().view(self.dtype).to(torch.float32)


class IntegerFormat:
    """Signed integers of `bits` bits with one scale per row. The error of an entry is at most half a scale (round to
    nearest) or one scale (stochastic rounding)."""

    lossless = False

    def __init__(self, row: RowSize) -> None:
        self.bits, self.largest, self.row_nbytes = row.bits, 2 ** (row.bits - 1) - 1, row.nbytes
        self.wants_rotation = row.bits < 8

    def encode(self, values_NW: Tensor, uniform: UniformSampler | None = None) -> Tensor:
        values_NW = values_NW.float()
        scale_N1 = round_up_to_bf16(values_NW.abs().amax(1, keepdim=True) / self.largest)
        steps_NW = values_NW / torch.where(scale_N1 == 0, 1.0, scale_N1.float())
        whole_NW = steps_NW.round() if uniform is None else (steps_NW + uniform(steps_NW)).floor()
        integers_NW = whole_NW.clamp(-self.largest, self.largest).to(torch.int8)
        packed = integers_NW.view(torch.uint8) if self.bits == 8 else pack_nibbles(integers_NW)
        return torch.cat((scale_N1.view(torch.uint8), packed), dim=1)

    def decode(self, rows: Tensor, width: int) -> Tensor:
        scale_N1 = rows[:, :2].flatten().view(torch.bfloat16).float()[:, None]
        packed = rows[:, 2:]
        integers_NW = packed.contiguous().view(torch.int8) if self.bits == 8 else _signed(unpack_nibbles(packed, width))
        return integers_NW.float() * scale_N1


def round_up_to_bf16(scale: Tensor) -> Tensor:
    """Rounds up to the next bfloat16, so that the largest entry of a row still fits the integer range."""
    nearest = scale.to(torch.bfloat16)
    upwards = torch.where(nearest < 0, -1, 1).to(torch.int16)
    next_up = (nearest.view(torch.int16) + upwards).view(torch.bfloat16)
    return torch.where(nearest.float() < scale, next_up, nearest)


def _signed(nibbles: Tensor) -> Tensor:
    """4-bit two's complement in uint8 to int8."""
    integers = nibbles.to(torch.int8)
    return torch.where(integers > 7, integers - 16, integers)


FORMATS: dict[str, NumberFormat] = {
    "fp32": FloatFormat(torch.float32, ROW_SIZES["fp32"]),
    "bf16": FloatFormat(torch.bfloat16, ROW_SIZES["bf16"]),
    "int8": IntegerFormat(ROW_SIZES["int8"]),
    "int4": IntegerFormat(ROW_SIZES["int4"]),
}
