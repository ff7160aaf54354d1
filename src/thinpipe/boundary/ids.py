"""Token ids as packed little-endian integers of 16, 24 or 32 bits, so that only the first segment reads data."""

import torch
from torch import Tensor

from thinpipe.boundary.lengths import id_nbytes


def pack_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """uint8, [number of ids * id_nbytes]."""
    four_bytes = ids.flatten().to(torch.int32).view(torch.uint8).view(-1, 4)
    return four_bytes[:, : id_nbytes(vocab_size)].flatten()


def unpack_ids(packed: Tensor, shape: tuple[int, ...], vocab_size: int) -> Tensor:
    size = id_nbytes(vocab_size)
    four_bytes = torch.nn.functional.pad(packed.view(-1, size), (0, 4 - size)).contiguous()
    return four_bytes.view(torch.int32).long().view(shape)
