"""Unsigned integers of any number of bits, packed into bytes without gaps, row by row."""

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.boundary.lengths import packed_nbytes


def pack_bits(integers_NM: Tensor, bits: int) -> Tensor:
    """uint8, [N, packed_nbytes(M, bits)]. Whole bytes of every integer first, then its highest bits in eights."""
    count, whole, rest = integers_NM.shape[1], bits // 8, bits % 8
    integers_NM = integers_NM.long()
    parts = [(integers_NM >> 8 * byte).to(torch.uint8) for byte in range(whole)]
    if rest:
        parts.append(_pack_eights(integers_NM >> 8 * whole, rest)[:, : packed_nbytes(count, rest)])
    return torch.cat(parts, dim=1) if parts else integers_NM.new_empty(len(integers_NM), 0, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """int64, [N, count]."""
    whole, rest = bits // 8, bits % 8
    integers_NM = torch.zeros(len(packed), count, dtype=torch.int64, device=packed.device)
    for byte in range(whole):
        integers_NM |= packed[:, byte * count : (byte + 1) * count].long() << 8 * byte
    if rest:
        integers_NM |= _unpack_eights(packed[:, whole * count :], count, rest) << 8 * whole
    return integers_NM


def _pack_eights(integers_NM: Tensor, bits: int) -> Tensor:
    """Eight integers of `bits` < 8 bits fill `bits` bytes of one word."""
    rows, count = integers_NM.shape
    eights = F.pad(integers_NM, (0, -count % 8)).view(rows, -1, 8)
    words = (eights << _shifts(bits, integers_NM.device)).sum(2)
    return words.view(torch.uint8).view(rows, -1, 8)[:, :, :bits].flatten(1)


def _unpack_eights(packed: Tensor, count: int, bits: int) -> Tensor:
    eights = F.pad(packed, (0, -packed.shape[1] % bits)).view(len(packed), -1, bits)
    words = F.pad(eights, (0, 8 - bits)).contiguous().view(torch.int64)
    return (words >> _shifts(bits, packed.device) & (1 << bits) - 1).flatten(1)[:, :count]


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 8 * bits, bits, device=device)
