"""Memory of the device of this process, and the device's name. Those of the host are in `device/host.py`."""

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
