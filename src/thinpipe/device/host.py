"""The host of this process: its free memory and its processor's name, and whether torch could have another device at
all. Imports no torch, so that a run that does not fit is refused at once."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from thinpipe.core.errors import UserError

_ACCELERATORS = ("cuda", "mps", "xpu")


def free_host_nbytes() -> int:
    """Bytes of host memory that this process can still allocate without swapping."""
    return int(min(psutil.virtual_memory().available, _container_nbytes()))


def _container_nbytes(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes left under the memory limit of a Linux container (cgroup v2); infinite without a limit."""
    try:
        limit, used = ((folder / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return float("inf")
    return float("inf") if limit == "max" else max(0.0, float(limit) - float(used))


def is_surely_cpu(name: str) -> bool:
    """True if a run with this `training.device` computes on the CPU for certain: it says so, or torch is a build for
    processors alone (2.13.0+cpu) and no package adds a device to torch."""
    if name != "auto":
        return name == "cpu"
    try:
        build = version("torch").partition("+")[2]
    except PackageNotFoundError:
        return False
    return build == "cpu" and sys.platform != "darwin" and not entry_points(group="torch.backends")


def refuse_absent_accelerator(name: str) -> None:
    """Raises UserError for a `training.device` that torch's build for processors alone cannot have, in the words of
    `device.choice.choose_device`, which knows the rest and imports torch."""
    if name.partition(":")[0] in _ACCELERATORS and is_surely_cpu("auto"):
        raise no_device(name, [])


def no_device(name: str, accelerators: Sequence[str]) -> UserError:
    """What to say of a device that this machine has not; `accelerators`: the names of those that it has."""
    return UserError(f"there is no device {name!r} here: write {', '.join(['auto', 'cpu', *accelerators])}")


def processor_name() -> str:
    """Vendor's name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = dict(reversed([(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]))
    on_arm = " ".join(facts[key] for key in ("CPU implementer", "CPU part") if key in facts)
    return (
        facts.get("model name") or on_arm or _name_on_macos() or platform.processor() or platform.machine() or os.name
    )


def _name_on_macos() -> str:
    """For example Apple M4 Pro; empty on other systems."""
    if platform.system() != "Darwin":
        return ""
    asked = ["sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(asked, capture_output=True, text=True, errors="replace", check=False).stdout.strip()
