"""Moments of AdamW in 8 bits a number: floating-point numbers with 3 mantissa bits, whose exponents count down from the
largest number of their block of 128.

A float32 without its lowest 20 bits is an exponent and 3 mantissa bits; read as an integer it grows by 1 from one such
number to the next. A block stores its largest integer (`max`, int16) and for every number the distance from it: 255
steps for the second moment, which is never negative (32 powers of two), 127 and a sign for the first (16 powers of
two). What lies below is 0 in a first moment. A second moment that is not 0 never becomes 0, which would make the next
update huge. Rounding is stochastic, so that also changes below a step (1/8 to 1/16 of a number) add up in the mean: a
second moment that decays by 5 % would stay for ever where it is if it was rounded to nearest. All of this is integer
arithmetic and equal on every device.

Not taken from a library: bitsandbytes and torchao have kernels of their own for some kinds of devices each, which are
not made to compute equal bits on all, and neither has the row-wise rule or the Stiefel step.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.config.precision import MOMENT_BLOCK

_DROPPED_BITS = 20
_MAGNITUDE = 0x7FFFFFFF
"""Mask of a float32 without its sign."""
_NEAREST = 1 << (_DROPPED_BITS - 1)
LARGEST_CODE = {torch.int8: 127, torch.uint8: 255}
"""By data type of the codes: int8 for first moments, uint8 for second moments."""


def empty_codes(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of zeros, of the shape of `like`, and the `max` of their blocks."""
    blocks = -(-like.numel() // MOMENT_BLOCK)
    return torch.zeros_like(like, dtype=dtype), torch.zeros(blocks, dtype=torch.int16, device=like.device)


def encode(values: Tensor, dtype: torch.dtype, random: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """float32 numbers as codes of the same shape, and the `max` of every block of the flattened numbers; the last block
    may be short. `random`: 8 random bits for each number (int32, 0 to 255); None rounds to nearest."""
    noise = _NEAREST if random is None else (random << (_DROPPED_BITS - 8)).add_(1 << (_DROPPED_BITS - 9))
    bits = values.view(torch.int32)
    integers = _blocks((bits & _MAGNITUDE).add_(noise).bitwise_right_shift_(_DROPPED_BITS))
    largest = integers.amax(1, keepdim=True)
    codes = (integers - (largest - LARGEST_CODE[dtype])).clamp_(min=0)
    if dtype == torch.uint8:
        codes = torch.maximum(codes, integers.clamp_(max=1), out=codes)
    codes = codes.view(-1)[: values.numel()].view(values.shape)
    if dtype == torch.int8:
        negative = bits >> 31  # -1 or 0
        codes.bitwise_xor_(negative).sub_(negative)
    return codes.to(dtype), largest.view(-1).to(torch.int16)


def decode(codes: Tensor, maxima: Tensor) -> Tensor:
    """The float32 numbers of `encode`."""
    signed = codes.to(torch.int32)
    blocks = _blocks(signed.abs())
    integers = blocks + (maxima.to(torch.int32) - LARGEST_CODE[codes.dtype])[:, None]
    bits = integers.mul_(blocks.clamp_(max=1)).bitwise_left_shift_(_DROPPED_BITS)
    bits = bits.view(-1)[: codes.numel()].view(codes.shape)
    return bits.bitwise_or_(signed & ~_MAGNITUDE).view(torch.float32)


def _blocks(numbers: Tensor) -> Tensor:
    """[blocks, MOMENT_BLOCK], a short last block filled with zeros."""
    missing = -numbers.numel() % MOMENT_BLOCK
    flat = numbers.reshape(-1)
    return (F.pad(flat, (0, missing)) if missing else flat).view(-1, MOMENT_BLOCK)
