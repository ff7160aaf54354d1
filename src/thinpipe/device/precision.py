"""Units of a device for narrow numbers."""

import torch

from thinpipe.device.choice import device_module


def has_bf16_units(device: torch.device) -> bool | None:
    """None if torch does not say so, as for processors and MPS."""
    supported = None if device.type == "cpu" else getattr(device_module(device), "is_bf16_supported", None)
    return None if supported is None else bool(supported(including_emulation=False))
