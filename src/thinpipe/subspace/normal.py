"""Normal random numbers that depend on the seed alone, not on the device or dtype of the target."""

import torch
from torch import Tensor

_CHUNK = 1 << 22
"""Numbers drawn at a time, to avoid a second copy of a large table."""


@torch.no_grad()
def fill_normal(target: Tensor, std: float, seed: int) -> None:
    """Fills `target` in place with numbers drawn in float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    flat = target.view(-1)
    buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float32, device="cpu")
    for chunk in flat.split(_CHUNK):
        chunk.copy_(buffer[: chunk.numel()].normal_(std=std, generator=generator))
