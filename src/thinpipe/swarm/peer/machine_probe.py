"""Measures a peer's machine: floating-point rate in matrix products, and memory that a run may use.

The product is [tokens, D] times [D, 4 D], about that of an MLP, forward and backward, in the run's precision. A whole
training step reaches a lower rate (norms, attention, optimizer), by a factor that is much the same for machines of a
kind: the partition of segments over peers comes out right, predicted step times come out too short.
Links are measured by bandwidth_probe.
"""

import time

import torch
import torch.nn.functional as F

from thinpipe.config.precision import Recipe, recipe_of
from thinpipe.config.run import RunConfig
from thinpipe.device.choice import choose_device, synchronise
from thinpipe.device.device_class import device_class
from thinpipe.device.memory import device_name
from thinpipe.device.precision import has_bf16_units
from thinpipe.swarm.protocol.machine_report import ProcessorReport
from thinpipe.training.memory_check import device_budget, kernel_for

_FIRST_TOKENS = 32
"""Number of tokens in the first, smallest measurement."""
_LONG_ENOUGH_SECONDS = 0.1
"""The number of tokens is doubled while one forward and backward product takes less than this many seconds."""


def measure_machine(
    config: RunConfig,
    *,
    dim: int,
    heads: tuple[int, int, int],
    memory_limit_nbytes: int | None = None,
    seconds: float = 1.0,
) -> ProcessorReport:
    """Measures for about `seconds`. `dim`: hidden dimension of the model; `heads`: number of query heads and of key
    heads in a block, and their width; `memory_limit_nbytes`: the owner's limit on memory."""
    device = choose_device(config.training.device)
    recipe = recipe_of(config.training.precision, has_bf16_units=has_bf16_units(device), device=device_name(device))
    flops = measure_flops(
        device, tokens=config.microbatch_size * config.training.seq_len, dim=dim, recipe=recipe, seconds=seconds
    )
    budget = device_budget(device)
    return ProcessorReport(
        device=device_name(device),
        device_class=device_class(device),
        threads=torch.get_num_threads(),
        flops=flops,
        memory_nbytes=budget.offered_nbytes(memory_limit_nbytes),
        host_memory_nbytes=budget.offered_host_nbytes,
        attention=kernel_for(recipe, heads, device),
    )


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
