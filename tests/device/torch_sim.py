"""The module `torch.sim`: what `torch.cuda` is for CUDA, for the device `sim`, as far as torch and thinpipe ask for it.

Counts (`counts()`) are of the whole process since `reset_counts()`:

| name | what |
|---|---|
| `kernels` | operators that ran on the device |
| `to_device_blocking`, `to_device_non_blocking`, `to_device_bytes` | copies from the host |
| `to_device_staged` | non-blocking copies from pageable memory: the host has read them, but waits for no stream |
| `to_host_blocking`, `to_host_non_blocking`, `to_host_bytes` | copies to the host |
| `between_devices`, `between_devices_bytes` | copies from one `sim` device to another |
| `synchronize_stream`, `synchronize_event`, `synchronize_device` | calls of `synchronize` |
| `synchronize_elsewhere` | those of an event by a thread on another device, where CUDA would open a context |
| `synchronize_item`, `synchronize_shape` | `Tensor.item()`; operators whose result has a size that depends on numbers |
"""

import os
from collections import Counter
from contextlib import contextmanager

import torch

Stream = torch.Stream
Event = torch.Event
default_generators: tuple[torch.Generator, ...] = ()
"""One per device; filled when the device is loaded."""

memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info
empty_cache = torch.accelerator.empty_cache
synchronize = torch.accelerator.synchronize
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index


def is_available():
    return device_count() > 0


def device_count():
    return torch.ops.sim.device_count()


def is_initialized():
    return True


def _lazy_init():
    pass


def _is_in_bad_fork():
    return False


def get_device_name(device=None):  # noqa: ARG001
    return "simulated device"


def _index(device):
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


@contextmanager
def device(device):
    with torch.accelerator.device_index(None if device is None else _index(device)):
        yield


@contextmanager
def stream(stream):
    """As `torch.cuda.stream`; None changes nothing."""
    if stream is None:
        yield
    else:
        with stream:
            yield


def default_stream(device=None):
    device_type = int(torch._C._autograd.DeviceType.PrivateUse1)
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=device_type)


# Random numbers.


def manual_seed(seed):
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(seed)


def seed():
    return default_generators[current_device()].seed()


def initial_seed():
    return default_generators[current_device()].initial_seed()


def get_rng_state(device="sim"):
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state, device="sim"):
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all():
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states):
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


# Dtypes.


def get_amp_supported_dtype():
    return [torch.bfloat16, torch.float16]


if "SIM_BF16_UNITS" in os.environ:  # 1 or 0; without it the device does not say, as MPS

    def is_bf16_supported(including_emulation=True):  # noqa: ARG001  as torch.cuda's
        return os.environ["SIM_BF16_UNITS"] == "1"


# What no real device has.


def counts():
    """A Counter of what the device has done, by the names above."""
    return Counter(torch.ops.sim.counts())


def kernel_counts():
    """A Counter of the operators that ran on the device, by their names."""
    return Counter(torch.ops.sim.kernel_counts())


def reset_counts():
    torch.ops.sim.reset_counts()


def set_float64(supported):
    """Whether the device has float64. It starts without if SIM_NO_F64=1 is in the environment."""
    torch.ops.sim.set_float64(supported)


def set_grouped_attention(is_fused):
    """Whether attention with fewer heads of keys than of queries has a fused kernel; CUDA has none in float32."""
    torch.ops.sim.set_grouped_attention(is_fused)


def set_races(are_errors):
    """Whether races raise RuntimeError. They start as no errors if SIM_RACES=0 is in the environment."""
    torch.ops.sim.set_races(are_errors)


def set_seed(seed):
    """Lets copies and synchronisations take random times of up to 3 ms, so that threads meet in another order for each
    seed; 0: no such times. SIM_SEED in the environment is the first seed."""
    torch.ops.sim.set_seed(seed)


def set_visible(visible):
    """Whether `is_available` and `device_count` tell of the device: a process whose other tests choose their device by
    themselves hides it from them."""
    torch.ops.sim.set_visible(visible)
