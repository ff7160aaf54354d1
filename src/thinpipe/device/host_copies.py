"""Copies of messages between the device and the host: through pinned memory where torch has it for the device."""

import torch
from torch import Tensor


def to_host(message: Tensor) -> Tensor:
    """Copies the message to host memory; the copy is complete on return."""
    if not has_pinned_memory(message.device):
        return message.cpu()
    host = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
    host.copy_(message, non_blocking=True)
    torch.accelerator.current_stream(message.device).synchronize()
    return host


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Host buffer for receiving a message that is then copied to `device`; pinned if that is of use."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_pinned_memory(device))


def has_pinned_memory(device: torch.device) -> bool:
    """True if copies between pinned memory and the device can be asynchronous. The CPU needs none, and MPS shares the
    memory of the host."""
    return device.type not in ("cpu", "mps")
