"""Copies of messages between GPU and host, through pinned memory. Untested: nothing has run on a GPU yet."""

import torch
from torch import Tensor


def to_host(message: Tensor) -> Tensor:
    """Copies the message to host memory; the copy is complete on return."""
    if not message.is_cuda:
        return message.cpu()
    host = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
    host.copy_(message, non_blocking=True)
    torch.cuda.current_stream(message.device).synchronize()
    return host


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Host buffer for receiving a message that is then copied to `device`; pinned for CUDA."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
