"""Units of a device for narrow numbers."""

import torch

from thinpipe.device.choice import device_module


def has_bf16_units(device: torch.device) -> bool | None:
    """None if torch does not say so, as for processors and MPS."""
    supported = None if device.type == "cpu" else getattr(device_module(device), "is_bf16_supported", None)
    return None if supported is None else bool(supported(including_emulation=False))


def set_float32_products(device: torch.device, *, tf32: bool) -> None:
    """Whether CUDA computes products of float32 matrices with TF32 (10 mantissa bits), several times as fast, or
    exactly. A setting of the whole process. Other devices have no TF32."""
    if device.type == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
