"""Memory of the device of this process, and the device's name. Those of the host are in `device/host.py`."""

import gc
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil  # type: ignore[import-untyped]
import torch

from thinpipe.core.peak_memory import peak_resident_nbytes
from thinpipe.device.choice import device_module
from thinpipe.device.host import free_host_nbytes, processor_name


def has_own_memory(device: torch.device) -> bool:
    """False if tensors on the device are in the host's memory."""
    return device.type not in ("cpu", "mps")


def free_nbytes(device: torch.device) -> int:
    """Bytes that this process can still allocate on the device."""
    if device.type == "cpu":
        return free_host_nbytes()
    module = device_module(device)
    if device.type == "mps":  # a share of the host's memory, which other processes use too
        left = module.recommended_max_memory() - module.driver_allocated_memory()
        return int(min(left, free_host_nbytes()))
    return int(module.mem_get_info(device)[0])


def peak_nbytes(device: torch.device) -> int:
    """Peak memory of this process: resident set on the CPU, allocated tensors on a device of its own."""
    if device.type == "cpu":
        return peak_resident_nbytes()
    module = device_module(device)
    held = module.driver_allocated_memory() if device.type == "mps" else module.max_memory_allocated(device)
    return int(held)


def device_name(device: torch.device) -> str:
    """Vendor's name of the device."""
    if device.type != "cpu":
        named = getattr(device_module(device), "get_device_name", None)
        return str(named(device)) if named else f"{device.type} of {processor_name()}"
    return processor_name()


class MemoryPeak(msgspec.Struct, frozen=True, kw_only=True):
    """Peak memory of a piece of work."""

    allocated_nbytes: int
    """Bytes of tensors; on a CPU, growth of the resident set."""
    reserved_nbytes: int = 0
    """Bytes that the allocator had taken from the device; 0 on a CPU, where the system gives pages one by one."""


def forget_memory_peak(device: torch.device) -> int:
    """Starts a measurement of peak memory; returns the bytes in use, for `memory_peak`. On a CPU only Linux can forget
    an earlier peak of the process. What nobody holds any more is thrown away first, because it would lower the growth
    if it were thrown away meanwhile."""
    gc.collect()
    if device.type == "cpu":
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return int(psutil.Process().memory_info().rss)
    module = device_module(device)
    module.empty_cache()
    if device.type == "mps":  # which counts no peak: an emptied cache grows to it
        return int(module.driver_allocated_memory())
    module.reset_peak_memory_stats(device)
    return int(module.memory_allocated(device))


def memory_peak(device: torch.device, before_nbytes: int) -> MemoryPeak:
    """Peak since `forget_memory_peak`, which returned `before_nbytes`."""
    allocated = peak_nbytes(device) - before_nbytes
    if device.type in ("cpu", "mps"):
        return MemoryPeak(allocated_nbytes=allocated)
    return MemoryPeak(
        allocated_nbytes=allocated, reserved_nbytes=int(device_module(device).max_memory_reserved(device))
    )
