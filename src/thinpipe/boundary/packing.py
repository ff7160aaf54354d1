"""Bit packing: unsigned integers of any bit width to bytes without gaps, row by row; token ids to 2 to 4 bytes; and the
flags of chats (`core.token_flags`) to 2 bits."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from thinpipe.boundary.sizes import id_bits, id_nbytes, packed_nbytes
from thinpipe.core.token_flags import FLAG_BITS, FLAG_SHIFT, ID_MASK


def pack_bits(integers_NM: Tensor, bits: int) -> Tensor:
    """[N, M] to uint8 [N, packed_nbytes(M, bits)].

    Layout of a row: the lowest byte of all integers, the next byte of all integers and so on, then the remaining
    high-order bits (bits mod 8), packed in groups of eight integers.
    """
    if bits == 4:
        return pack_nibbles(integers_NM.to(torch.uint8))
    count, whole, rest = integers_NM.shape[1], bits // 8, bits % 8
    integers_NM = integers_NM.long()
    parts = [(integers_NM >> 8 * byte).to(torch.uint8) for byte in range(whole)]
    if rest:
        parts.append(_pack_eights(integers_NM >> 8 * whole, rest)[:, : packed_nbytes(count, rest)])
    return torch.cat(parts, dim=1) if parts else integers_NM.new_empty(len(integers_NM), 0, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int, bits: int) -> Tensor:
    """uint8 [N, packed_nbytes(count, bits)] to int64 [N, count]."""
    if bits == 4:
        return unpack_nibbles(packed, count).long()
    whole, rest = bits // 8, bits % 8
    integers_NM = torch.zeros(len(packed), count, dtype=torch.int64, device=packed.device)
    for byte in range(whole):
        integers_NM |= packed[:, byte * count : (byte + 1) * count].long() << 8 * byte
    if rest:
        integers_NM |= _unpack_eights(packed[:, whole * count :], count, rest) << 8 * whole
    return integers_NM


def pack_nibbles(integers_NM: Tensor) -> Tensor:
    """The lowest 4 bits of 8-bit integers [N, M] to uint8 [N, ceil(M / 2)], the earlier integer in the lower bits."""
    if integers_NM.shape[1] % 2:
        integers_NM = F.pad(integers_NM, (0, 1))
    nibbles = integers_NM.view(torch.uint8) & 0xF
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """uint8 [N, ceil(count / 2)] to uint8 [N, count], of 0 to 15."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(1)[:, :count]


def _pack_eights(integers_NM: Tensor, bits: int) -> Tensor:
    """Packs eight integers of `bits` < 8 bits each into `bits` bytes, through one 64-bit word."""
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


def pack_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Token ids to uint8 [number of ids * id_nbytes(vocab_size)]."""
    four_bytes = ids.flatten().to(torch.int32).view(torch.uint8).view(-1, 4)
    return four_bytes[:, : id_nbytes(vocab_size)].flatten()


def unpack_ids(packed: Tensor, shape: tuple[int, ...], vocab_size: int) -> Tensor:
    size = id_nbytes(vocab_size)
    four_bytes = torch.nn.functional.pad(packed.view(-1, size), (0, 4 - size)).contiguous()
    return four_bytes.view(torch.int32).long().view(shape)


def pack_flagged_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Token ids with flags (`core.token_flags`) to uint8, the flags in the upper bits of `id_bits`."""
    bits = id_bits(vocab_size, has_flags=True)
    integers = (ids & ID_MASK) | (ids >> FLAG_SHIFT << bits - FLAG_BITS)
    return pack_bits(integers.view(1, -1), bits).flatten()


def unpack_flagged_ids(packed: Tensor, shape: tuple[int, ...], vocab_size: int) -> Tensor:
    bits = id_bits(vocab_size, has_flags=True)
    integers = unpack_bits(packed.view(1, -1), math.prod(shape), bits).view(shape)
    shift = bits - FLAG_BITS
    return (integers & (1 << shift) - 1) | (integers >> shift << FLAG_SHIFT)


def pack_flags(ids: Tensor) -> Tensor:
    """The flags of token ids without the ids, to uint8."""
    return pack_bits((ids >> FLAG_SHIFT).view(1, -1), FLAG_BITS).flatten()


def unpack_flags(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flags as of token ids that are all 0."""
    return unpack_bits(packed.view(1, -1), math.prod(shape), FLAG_BITS).view(shape) << FLAG_SHIFT
