"""The device `sim`: a second torch device on a machine that has only a CPU, to test what runs on accelerators.

`sim` computes with torch's CPU kernels on memory of its own (PrivateUse1, C++ in this folder) and behaves towards its
users as CUDA does: operators refuse tensors of different devices, streams and events exist, copies and synchronisations
are counted. `sim` finds races: an operator that is not ordered after what it depends on raises RuntimeError and names
both (see `ordering.h`). Non-blocking copies with pinned memory take place as late as they may: a target that is read
too early holds NaN, and a source that is overwritten too early is an error.

In the environment of a program: SIM_DEVICES (2), SIM_NO_F64=1 (no float64, as MPS), SIM_RACES=0 (races are no errors),
SIM_MEMORY_BYTES (of each device; the machine's memory if not given), SIM_BF16_UNITS (1 or 0: what `is_bf16_supported`
says; not given: the device does not say), SIM_SEED (copies and synchronisations take random
times, so that threads meet in another order for each seed).

Programs that a test starts get the device from their environment (`environment()`), without code for it: torch loads
the backends that installed packages name as entry points of the group `torch.backends`, and the folder `autoload` on
PYTHONPATH looks like a folder with such a package.
"""

import os
from pathlib import Path

import torch

from tests.device import torch_sim
from tests.device.build import build

AUTOLOAD = Path(__file__).parent / "autoload"
_ROOT = Path(__file__).parents[2]


def load():
    """Makes the device known to torch, and returns `torch.sim`. Before the first backward pass of a process: that one
    starts a thread for each device there is."""
    if not hasattr(torch, "sim"):
        torch.ops.load_library(build())
        torch.utils.rename_privateuse1_backend("sim")
        torch._register_device_module("sim", torch_sim)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        torch_sim.default_generators = tuple(
            torch.ops.sim.default_generator(index) for index in range(torch_sim.device_count())
        )
    return torch.sim


def environment(**settings: object) -> dict[str, str]:
    """Variables with which a program and its children have the device; `settings` as `SIM_NO_F64=1`."""
    paths = [str(AUTOLOAD), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)} | {name: str(value) for name, value in settings.items()}
