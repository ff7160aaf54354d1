"""What must be alike for two devices to compute the same bits, as one line of text: the class of a device.

A class names the device and the software that chooses its kernels, and ends with a digest of numbers that the device
has just computed (`_digest`), which differs where settings that nobody thought of change results. Equal classes are the
condition of "bit for bit"; unlike classes may still agree, which is measured and never promised (`core.exactness`).
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F

from thinpipe.device.choice import CPU, device_module
from thinpipe.device.memory import device_name

_MAX_CHARACTERS = 180
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
"""Variable that cuBLAS reads when it starts; without it torch refuses matrix products in deterministic mode."""


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Allows only deterministic algorithms of torch, if `wanted`, and restores the caller's setting. To be entered
    before the first product on an accelerator: cuBLAS reads its variable then."""
    if not wanted:
        yield
        return
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def device_class(device: torch.device) -> str:
    """Class of the device with the present settings of torch; empty if the device does not repeat its own bits, as an
    accelerator outside of `deterministic_algorithms`, or if nobody has seen that it does, as MPS."""
    if device.type == "mps" or (device.type != "cpu" and not torch.are_deterministic_algorithms_enabled()):
        return ""
    if device.type == "cpu":
        kernels = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)"
    else:
        kernels = f"{_processors(device)}deterministic"
    named = f"{device.type}: {device_name(device)}, {kernels}, torch {torch.__version__}"
    return f"{named[:_MAX_CHARACTERS]}, {_digest(device)}"


def _processors(device: torch.device) -> str:
    """Number of multiprocessors, by which libraries choose kernels: cards of one name may differ in it."""
    properties = getattr(device_module(device), "get_device_properties", None)
    count = getattr(properties(device), "multi_processor_count", None) if properties else None
    return f"{count} multiprocessors, " if count else ""


def _digest(device: torch.device) -> str:
    """Eight digits that change with any bit of a small attention layer's outputs and gradients in float32."""
    with torch.enable_grad():
        x_BTD = _ramp(2, 33, 192).to(device).requires_grad_()
        weights = [_ramp(192, 192, shift=shift).to(device).requires_grad_() for shift in (1, 2, 3)]
        query, key, value = (F.linear(x_BTD, weight).view(2, 33, 3, 64).transpose(1, 2) for weight in weights)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(F.silu(F.rms_norm(mixed, (192,))).flatten(0, 1), torch.arange(66, device=device))
        found = [mixed, loss, *torch.autograd.grad(loss, (x_BTD, *weights))]
    hashed = hashlib.sha256(b"".join(tensor.detach().to(CPU).numpy().tobytes() for tensor in found))
    return hashed.hexdigest()[:8]


def _ramp(*shape: int, shift: int = 0) -> torch.Tensor:
    """Numbers between -0.5 and 0.5 from integer arithmetic, the same on every machine."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 7919 * shift) * 40503 % 65521).to(torch.float32).div(65521).sub(0.5).view(shape)
