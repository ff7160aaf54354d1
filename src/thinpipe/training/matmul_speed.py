"""Speed of a device in matrix products: [tokens, D] times [D, 4 D], about that of an MLP, forward and backward.

A whole training step reaches a lower rate (norms, attention, optimizer), by a factor that is much the same for machines
of a kind.
"""

import time

import torch
import torch.nn.functional as F

from thinpipe.config.precision import Recipe
from thinpipe.device.choice import synchronise

_FIRST_TOKENS = 32
"""Number of tokens in the first, smallest measurement."""
_LONG_ENOUGH_SECONDS = 0.1
"""The number of tokens is doubled while one forward and backward product takes less than this many seconds."""


def measure_flops(device: torch.device, *, tokens: int, dim: int, recipe: Recipe, seconds: float) -> float:
    """Floating-point operations per second, the best of several runs: disturbances only make a run slower.

    The product is [tokens, dim] times [dim, 4 dim], forward and backward; with fewer tokens where all of them would
    take too long.
    """
    dtype = getattr(torch, recipe.weights)
    weight = torch.randn(4 * dim, dim, dtype=dtype, device=device).mul_(0.02)
    rows = min(tokens, _FIRST_TOKENS)
    _time_matmul(weight, rows, recipe.autocast_bf16)  # warm-up: libraries load on first use
    best, began = 0.0, time.monotonic()
    while True:
        seconds_taken = _time_matmul(weight, rows, recipe.autocast_bf16)
        best = max(best, 6 * weight.numel() * rows / seconds_taken)
        if time.monotonic() - began >= seconds:
            return best
        if rows < tokens and seconds_taken < _LONG_ENOUGH_SECONDS:
            rows = min(tokens, 2 * rows)


def _time_matmul(weight: torch.Tensor, rows: int, autocast_bf16: bool) -> float:
    """Seconds of one forward and backward matrix product, without autograd: given a gradient, it imports sympy."""
    x_ND = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    gradient = torch.ones(rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
    synchronise(weight.device)
    began = time.perf_counter()
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=autocast_bf16):
        F.linear(x_ND, weight)
        gradient @ weight
        gradient.T @ x_ND
    synchronise(weight.device)
    return time.perf_counter() - began
