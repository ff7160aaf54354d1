"""What this machine can do for a run: matrix products a second, and memory that may be used.

The products are those of an MLP of the model, forward and backward, in the run's number formats. A whole step does
less per second (norms, attention, the optimiser), by a share that is much the same for all machines of a kind, so that
shares of the work come out right and absolute speeds come out high.
"""

import os
import platform
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import torch
import torch.nn.functional as F

from thinpipe.core.errors import UserError
from thinpipe.swarm.reports import ProcessorReport
from thinpipe.train.config import RunConfig
from thinpipe.train.engine import choose_device

_FIRST_TOKENS = 32
_LONGEST_TAKE_SECONDS = 0.1
_SHARE_OF_RAM, _SHARE_OF_GPU = 0.8, 0.9
"""Of what is free now: the rest is for other programs, and for what the allocator cannot fill."""


def measure_machine(
    config: RunConfig, *, dim: int, memory_limit_nbytes: int | None = None, seconds: float = 1.0
) -> ProcessorReport:
    """Takes about so long. `dim` is the model's, `memory_limit_nbytes`: what the owner lets a run have at most."""
    device = choose_device(config.training.device)
    flops = measure_flops(
        device,
        tokens=config.microbatch_size * config.training.seq_len,
        dim=dim,
        dtype=getattr(torch, config.training.dtype),
        autocast_bf16=config.execution.autocast_bf16,
        seconds=seconds,
    )
    return ProcessorReport(
        device=device_name(device),
        threads=torch.get_num_threads(),
        flops=flops,
        memory_nbytes=usable_nbytes(device, memory_limit_nbytes),
    )


def measure_flops(
    device: torch.device, *, tokens: int, dim: int, dtype: torch.dtype, autocast_bf16: bool, seconds: float
) -> float:
    """Operations a second in the best of several takes: what disturbs one makes it slower, never faster.

    Of [tokens, dim] times [dim, 4 dim], forward and backward. Fewer tokens where all of them would take too long.
    """
    weight = torch.randn(4 * dim, dim, dtype=dtype, device=device).mul_(0.02).requires_grad_()
    rows = min(tokens, _FIRST_TOKENS)
    _take(weight, rows, autocast_bf16)  # libraries load on first use
    best, began = 0.0, time.monotonic()
    while True:
        took = _take(weight, rows, autocast_bf16)
        best = max(best, 6 * weight.numel() * rows / took)
        if time.monotonic() - began >= seconds:
            return best
        if rows < tokens and took < _LONGEST_TAKE_SECONDS:
            rows = min(tokens, 2 * rows)


def _take(weight: torch.Tensor, rows: int, autocast_bf16: bool) -> float:
    x_ND = torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device, requires_grad=True)
    gradient = torch.ones(rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
    _synchronise(weight.device)
    began = time.perf_counter()
    with torch.autocast(weight.device.type, torch.bfloat16, enabled=autocast_bf16):
        out = F.linear(x_ND, weight)
    torch.autograd.grad(out, (x_ND, weight), gradient.to(out.dtype))
    _synchronise(weight.device)
    return time.perf_counter() - began


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usable_nbytes(device: torch.device, limit_nbytes: int | None = None) -> int:
    """Memory that a run may use, beside what this process has already."""
    if limit_nbytes is not None and limit_nbytes < 1:
        raise UserError(
            f"a memory limit of {limit_nbytes} bytes leaves nothing to train with: leave it out, or raise it"
        )
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_GPU)
    else:
        free = int(min(psutil.virtual_memory().available, _container_nbytes()) * _SHARE_OF_RAM)
    return free if limit_nbytes is None else min(free, limit_nbytes)


def _container_nbytes(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """What the limit of a Linux container leaves; infinite where there is none."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else max(0.0, float(limit) - float(used))


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine() or os.name
