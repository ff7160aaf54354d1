"""Copies between the device and the host: through pinned memory where torch has it for the device.

Copies run beside the computation, on one stream of the device for each direction, and no copy of a message makes the
training thread wait for the device. `python -m tests.device.mutations` shows that each statement here that orders a
copy is needed.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from thinpipe.device.choice import make_current

_ALIGNMENT = 256
"""Bytes. Tensors in a buffer begin at multiples of this, as in memory of their own."""


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


def stream_through(batches: Sequence[Sequence[Tensor]], device: torch.device) -> Iterator[list[Tensor]]:
    """For each batch of host tensors, one after the other, their copies on `device`, which the caller may change on the
    current stream until it asks for the next batch. The host tensors have all changes when the iterator has ended.

    The tensors are pinned ones. At most two batches are on the device: while one is changed, the one before returns and
    the next arrives.
    """
    compute = torch.accelerator.current_stream(device)
    arriving, returning = (_copy_stream(compute.device, direction) for direction in ("to device", "to host"))
    nbytes = max((sum(map(_aligned_nbytes, batch)) for batch in batches), default=0)
    buffers = [torch.empty(nbytes, dtype=torch.uint8, device=compute.device) for _ in batches[:2]]
    placed = [_place(batch, buffers[index % 2]) for index, batch in enumerate(batches)]
    arriving.wait_stream(compute)  # memory of the buffers was in use before
    for index, (batch, here) in enumerate(zip(batches, placed, strict=True)):
        if index == 0:
            _copy(batch, here, arriving)
        compute.wait_stream(arriving)
        if index + 1 < len(batches):
            arriving.wait_stream(returning)  # the buffer of the next batch is that of the one before
            _copy(batches[index + 1], placed[index + 1], arriving)
        yield here
        returning.wait_stream(compute)
        _copy(here, batch, returning)
    returning.synchronize()


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Host buffer for receiving a message that is then copied to `device`; pinned if that is of use."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=has_pinned_memory(device))


def pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory; itself if it is there."""
    return tensor.cpu().pin_memory()


def has_pinned_memory(device: torch.device) -> bool:
    """True if copies between pinned memory and the device can be asynchronous. The CPU needs none, and MPS shares the
    memory of the host."""
    return device.type not in ("cpu", "mps")


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor], stream: torch.Stream) -> None:
    with stream:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)


def _place(tensors: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Tensors of the same shapes and data types in the buffer."""
    placed, start = [], 0
    for tensor in tensors:
        placed.append(buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        start += _aligned_nbytes(tensor)
    return placed


def _aligned_nbytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


@cache
def _copy_stream(device: torch.device, direction: str) -> torch.Stream:  # noqa: ARG001  a stream for each direction
    return torch.Stream(device)
