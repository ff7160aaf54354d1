"""Copies of messages between the device and the host: through pinned memory where torch has it for the device.

Copies run beside the computation, on one stream of the device for each direction, and no copy makes the training thread
wait for the device. `python -m tests.device.mutations` shows that each statement here that orders a copy is needed.
"""

from functools import cache

import torch
from torch import Tensor

from thinpipe.device.choice import make_current


class CopyToHost:
    """A copy of a message to pinned memory, in flight: `host` holds the message once `wait` has returned."""

    def __init__(self, message: Tensor) -> None:
        """For the thread that has computed the message, on its current stream."""
        compute = torch.accelerator.current_stream(message.device)
        stream = _copy_stream(compute.device, "to host")
        self.host = torch.empty(message.shape, dtype=message.dtype, pin_memory=True)
        self._device, self._done = compute.device, torch.Event(compute.device)
        stream.wait_stream(compute)
        with stream:
            self.host.copy_(message, non_blocking=True)
        self._done.record(stream)
        self._source = message  # its memory must not be used for anything else before the copy is done

    def wait(self) -> None:
        """Blocks the calling thread, which may be any, until the copy is done; the device becomes its current one."""
        make_current(self._device)
        self._done.synchronize()


def to_device(host: Tensor, device: torch.device) -> Tensor:
    """The message on `device`, for use on the current stream. No thread waits for a copy from pinned memory: torch
    keeps that memory until the copy is done."""
    if not has_pinned_memory(device):
        return host.to(device)
    compute = torch.accelerator.current_stream(device)
    stream = _copy_stream(compute.device, "to device")
    with stream:
        message = host.to(compute.device, non_blocking=True)
    compute.wait_stream(stream)
    message.record_stream(compute)  # its memory is that of the other stream
    return message


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Host buffer for receiving a message that is then copied to `device`; pinned if that is of use."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_pinned_memory(device))


def has_pinned_memory(device: torch.device) -> bool:
    """True if copies between pinned memory and the device can be asynchronous. The CPU needs none, and MPS shares the
    memory of the host."""
    return device.type not in ("cpu", "mps")


@cache
def _copy_stream(device: torch.device, direction: str) -> torch.Stream:  # noqa: ARG001  a stream for each direction
    return torch.Stream(device)
