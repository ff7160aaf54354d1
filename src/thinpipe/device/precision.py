"""Units of a device for narrow numbers, and the narrow copies of weights that they read."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from thinpipe.device.choice import device_module

QUANTISED_DEVICES = ("cpu", "cuda", "xpu")
"""Types of devices on which the library bitsandbytes computes with weights of 4 or 8 bits."""


def has_bf16_units(device: torch.device) -> bool | None:
    """None if torch does not say so, as for processors and MPS."""
    supported = None if device.type == "cpu" else getattr(device_module(device), "is_bf16_supported", None)
    if supported is None:
        return None
    with torch.accelerator.device_index(device.index):  # torch answers for its current device
        return bool(supported(including_emulation=False))


def set_float32_products(device: torch.device, *, tf32: bool) -> None:
    """Whether CUDA computes products of float32 matrices with TF32 (10 mantissa bits), several times as fast, or
    exactly. A setting of the whole process. Other devices have no TF32.

    Not by `torch.backends.cuda.matmul.fp32_precision`: once that is "tf32", `torch.get_float32_matmul_precision` raises
    an error, and torch's compiler calls it.
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")


@contextmanager
def keep_casts() -> Iterator[None]:
    """Lets all forward passes inside share the copies that autocast makes of weights. Autocast drops its copies at the
    end of a pass, so that every micro-batch in flight would keep its own. Inside, weights must not change, and nothing
    may run under `torch.no_grad`, whose copies have no gradient."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
