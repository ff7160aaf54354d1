"""Checks of this machine: Python, torch and its devices, extras, threads, nats-server. Works if torch is broken."""

import os
import platform
import sys
from collections.abc import Iterable
from importlib.util import find_spec

from thinpipe.core.errors import UserError
from thinpipe.core.extras import install_hint
from thinpipe.core.numerics import INSTALL_TORCH, TESTED_TORCH, is_tested_torch
from thinpipe.core.units import format_bytes
from thinpipe.doctor.finding import Finding, not_checked, ok, problem, warning
from thinpipe.planning.calibration import Calibration, device_key, load_calibrations
from thinpipe.swarm.broker.server import find_server

_EXTRAS = {
    "report": ("matplotlib",),
    "swarm": ("nats", "nkeys", "cryptography"),
    "hf": ("transformers", "datasets"),
    "tune": ("transformers", "peft"),
    "qlora": ("bitsandbytes",),
    "parquet": ("pyarrow",),
    "dashboard": ("starlette", "uvicorn"),
    "prometheus": ("prometheus_client",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
}
"""Modules that each extra installs; see pyproject.toml."""


def machine_findings(*, swarm: bool, host: bool, device: str) -> list[Finding]:
    """Findings for this machine. `swarm`: it is to connect to a hub; `host`: it is to run one; `device`: the wanted
    device."""
    return [
        _python(),
        _torch(),
        _devices(device),
        _device_class(device),
        _threads(),
        _extras(needed=swarm or host),
        *_server(host),
    ]


def missing_extras(names: Iterable[str]) -> list[str]:
    """Extras of which a module is not installed."""
    return [name for name in names if not all(map(find_spec, _EXTRAS[name]))]


def _python() -> Finding:
    """Always ok: thinpipe does not install on an older Python."""
    return ok("python", f"{platform.python_version()} on {platform.system()}")


def _torch() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken installation can raise anything
        return problem("torch", f"cannot be imported: {error}", _install_torch(sys.platform, platform.machine()))
    found = str(torch.__version__)
    if not torch.distributed.is_available():
        return problem(
            "torch",
            f"{found} has no torch.distributed, without which no process can join a run",
            "Install PyTorch's own build. For AMD cards on Windows there is none: use Linux.",
        )
    from thinpipe.pipeline.torch_names import missing_names

    if missing := missing_names():
        return problem(
            "torch", f"{found} lacks names on which the pipeline relies: {', '.join(missing)}", f"Run {INSTALL_TORCH}."
        )
    if not is_tested_torch(found):
        return warning(
            "torch",
            f"{found} has all names on which the pipeline relies, but has not been tested with thinpipe; tested: "
            f"{', '.join(TESTED_TORCH)}",
            f"Run `thinpipe selftest`, which proves this machine. If it finds something wrong, run {INSTALL_TORCH}.",
        )
    return ok("torch", found)


def _install_torch(system: str, processor: str) -> str:
    """How to install torch; `system` and `processor` as `sys.platform` and `platform.machine` name them."""
    if (system, processor) == ("darwin", "x86_64"):
        return (
            "PyTorch has no build for Intel Macs any more: an Intel Mac cannot take part. On a Mac with Apple silicon "
            "install Python for arm64: this one is for Intel."
        )
    return f"Install it: {INSTALL_TORCH}."


def _devices(wanted: str) -> Finding:
    try:
        import torch
    except Exception:
        return not_checked("devices", "torch cannot be imported")
    from thinpipe.device.cards import unused_card
    from thinpipe.device.choice import accelerator_count, accelerator_type, choose_device
    from thinpipe.device.memory import device_name, free_nbytes

    devices = [torch.device(accelerator_type() or "cpu", index) for index in range(accelerator_count())]
    found = [f"{device} {device_name(device)}, {format_bytes(free_nbytes(device))} free" for device in devices]
    unused = unused_card()
    try:
        chosen = choose_device(wanted)
    except UserError as error:
        advice = unused.fix if unused else "Install torch's build for the device and its driver."
        return problem("devices", str(error), f"{advice} Or leave --device out.")
    if unused and wanted == "auto":
        return warning("devices", unused.text, unused.fix)
    proof = _proof(chosen.type, device_name(chosen), str(torch.__version__))
    return ok("devices", "; ".join(found) or "no GPU: thinpipe uses the CPU", proof)


def _proof(kind: str, name: str, torch_version: str) -> str:
    """Advice to test a device that no test of thinpipe has seen: every accelerator, and processors other than those of
    Linux on x86-64. Empty if `thinpipe selftest` has passed on the device with this torch."""
    is_known = kind == "cpu" and (platform.system(), platform.machine()) == ("Linux", "x86_64")
    tested = load_calibrations().get(device_key(kind, name), Calibration())
    if is_known or tested.torch == torch_version:
        return ""
    return "`thinpipe selftest` proves this device in three minutes, and measures it for plans."


def _device_class(wanted: str) -> Finding:
    """Devices of one class compute the same bits."""
    try:
        from thinpipe.device.choice import choose_device
        from thinpipe.device.device_class import deterministic_algorithms, device_class

        device = choose_device(wanted)
        with deterministic_algorithms(True):
            found = device_class(device)
    except Exception as error:  # torch is broken, has no such device, or cannot compute on it
        return not_checked("device class", str(error))
    return ok("device class", f"{found}; devices of one class compute the same bits (cards: with debug.deterministic)")


def _threads() -> Finding:
    try:
        import torch
    except Exception:
        return not_checked("threads", "torch cannot be imported")
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    text = f"torch uses {threads} threads on {cores} cores"
    if threads > cores:
        return warning("threads", text, f"Set OMP_NUM_THREADS to {cores} or less.")
    return ok("threads", text)


def _extras(*, needed: bool) -> Finding:
    missing = missing_extras(_EXTRAS)
    there = [name for name in _EXTRAS if name not in missing]
    text = f"installed: {', '.join(there) or 'none'}; not installed: {', '.join(missing) or 'none'}"
    if needed and "swarm" in missing:
        return problem("extras", text, f"A hub needs the extra swarm: {install_hint('swarm')}.")
    return ok("extras", text)


def _server(host: bool) -> list[Finding]:
    if not host:
        return []
    try:
        return [ok("nats-server", str(find_server()))]
    except UserError as error:
        return [problem("nats-server", "not found", f"{str(error)[0].upper()}{str(error)[1:]}.")]
