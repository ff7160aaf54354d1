"""Graphics cards of this machine that the installed torch cannot use, and the line that installs a torch that can.

PyPI's torch for Windows computes on the CPU only, and on every system a CPU build hides the card: torch itself says
nothing then. Cards are found by what the system and their drivers leave on the disk.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from thinpipe.core.install import TORCH_CUDA, TORCH_INDEX
from thinpipe.device.choice import accelerator_type

NVIDIA, AMD = "NVIDIA", "AMD"

_PCI_MAKERS = {"0x10de": NVIDIA, "0x1002": AMD}
_PCI_DISPLAY = "0x03"
"""First digits of the PCI class of graphics cards."""
_DRIVER_FILES = (
    (NVIDIA, "usr/lib/wsl/lib/libcuda.so.1"),
    (NVIDIA, "Windows/System32/nvcuda.dll"),
    (AMD, "Windows/System32/amdhip64*.dll"),
)
_INDEX_FOLDERS = {NVIDIA: TORCH_CUDA, AMD: "rocm7.2"}
"""Folders of PyTorch's package index."""
_ASK_SECONDS = 20.0


@dataclass(frozen=True)
class UnusedCard:
    """A card that torch cannot use."""

    text: str
    fix: str


def unused_card(root: Path | None = None) -> UnusedCard | None:
    """The card of this machine, if it has one and torch has no accelerator. `root`: folder in place of the file system
    that is searched."""
    if accelerator_type() is not None:
        return None
    names = _nvidia_names()
    makers = [NVIDIA] if names else [*_makers(root or Path(os.environ.get("SYSTEMDRIVE", "") + "/"))]
    if not makers:
        return None
    maker = NVIDIA if NVIDIA in makers else makers[0]
    found = f"torch {torch.__version__} does not see the graphics card ({', '.join(names) or maker})"
    return UnusedCard(f"{found}: thinpipe uses the CPU", _fix(maker, str(torch.__version__), sys.platform))


def _fix(maker: str, version: str, system: str) -> str:
    """What to do about a card of this maker with this version of torch; `system` as `sys.platform` names it."""
    version, _, build = version.partition("+")
    if maker == AMD and system == "win32":
        return (
            "Use Linux for this card, or let this machine compute on its CPU: AMD's torch for Windows has no "
            "torch.distributed, which thinpipe needs."
        )
    if build.startswith(("cu", "rocm")):
        return "This torch is built for graphics cards: update the driver of the card, then restart the machine."
    line = f"pip install --force-reinstall torch=={version} --index-url {TORCH_INDEX}/{_INDEX_FOLDERS[maker]}"
    return f"Install torch's build for it: {line}" + (", if ROCm supports the card." if maker == AMD else ".")


def _nvidia_names() -> list[str]:
    """Names of the cards that NVIDIA's driver knows; none without the driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _makers(root: Path) -> Iterator[str]:
    """Makers of the cards on the PCI bus (Linux), and of those whose driver is installed (Windows, WSL)."""
    for device in sorted(root.glob("sys/bus/pci/devices/*")):
        try:
            kind, maker = ((device / name).read_text("ascii").strip() for name in ("class", "vendor"))
        except (OSError, UnicodeDecodeError):
            continue
        if kind.startswith(_PCI_DISPLAY) and maker in _PCI_MAKERS:
            yield _PCI_MAKERS[maker]
    for maker, pattern in _DRIVER_FILES:
        if any(root.glob(pattern)):
            yield maker
