"""Which device a process computes on."""

import os
from types import ModuleType

import torch

from thinpipe.core.errors import UserError
from thinpipe.device.host import no_device

CPU = torch.device("cpu")


def choose_device(name: str) -> torch.device:
    """Device of this name, for example cpu, cuda, cuda:1 or mps; "auto": the accelerator of this machine, else the CPU.

    Without an index in its name, a process that was started as one of several on a machine (LOCAL_RANK, as torchrun
    sets it) takes the accelerator of its own number, and starts again at the first where there are more processes than
    accelerators. Raises UserError, with the devices that there are, for one that this machine has not.
    """
    try:
        wanted = torch.device(accelerator_type() or "cpu") if name == "auto" else torch.device(name)
    except RuntimeError:
        raise _unknown(name) from None
    if wanted.type == "cpu":
        return CPU
    count = accelerator_count() if wanted.type == accelerator_type() else 0
    if count == 0 or (wanted.index or 0) >= count:
        raise _unknown(name)
    index = int(os.environ.get("LOCAL_RANK", "0")) % count if wanted.index is None else wanted.index
    return torch.device(wanted.type, index)


def ranks_on_device(name: str, device: torch.device, ranks: range) -> tuple[int, ...]:
    """Those of a machine's processes (`ranks`, in the order of LOCAL_RANK) for which `choose_device(name)` is the same
    device as for this process."""
    if device.type == "cpu" or torch.device(name if name != "auto" else device.type).index is not None:
        return tuple(ranks)
    count = accelerator_count()
    return tuple(rank for local, rank in enumerate(ranks) if local % count == device.index)


def make_current(device: torch.device) -> None:
    """Makes the accelerator the current one of the calling thread. Without that, torch's helpers go back to the first
    card after each use of another one, which costs memory there."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)


def one_accelerator_each(name: str, count: int) -> list[torch.device]:
    """The first `count` accelerators of this machine. Raises UserError if there are fewer, or if `name` is the name of
    one device."""
    choose_device(name)
    kind, there = accelerator_type(), accelerator_count()
    if name not in ("auto", kind) or count > there:
        raise UserError(
            f"{count} invites are for {count} cards, and --device {name} has {there if name in ('auto', kind) else 1} "
            "here: pass one invite for each card, and no number in --device"
        )
    assert kind is not None
    return [torch.device(kind, index) for index in range(count)]


def accelerator_type() -> str | None:
    """Type of the accelerator of this machine, for example cuda; None if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def accelerator_count() -> int:
    return torch.accelerator.device_count() if accelerator_type() else 0


def device_module(device: torch.device) -> ModuleType:
    """torch's module for a type of device, for example `torch.cuda`."""
    module: ModuleType = torch.get_device_module(device)
    return module


def synchronise(device: torch.device) -> None:
    """Waits until the device has computed all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _unknown(name: str) -> UserError:
    return no_device(name, [f"{accelerator_type()}:{index}" for index in range(accelerator_count())])
