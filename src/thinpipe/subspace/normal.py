"""Normal random numbers that depend on the generator's seed alone, not on the device or the dtype they end up in."""

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""Drawn this many at a time, so that the largest table needs no second copy."""


@torch.no_grad()
def fill_normal(target: Tensor, std: float, seed: int) -> None:
    """Draws in float32 on the CPU and copies."""
    generator = torch.Generator().manual_seed(seed)
    flat = target.view(-1)
    buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32, device="cpu")
    for chunk in flat.split(_CHUNK):
        chunk.copy_(buffer[: chunk.numel()].normal_(std=std, generator=generator))
