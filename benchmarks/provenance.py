"""What a result file says of how it came about: software, machine, settings."""

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from thinpipe import __version__


def versions() -> dict[str, str]:
    return {
        "thinpipe": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def plain_settings(config: Any) -> dict[str, Any]:
    """The fields of a dataclass, paths as text."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(config).items()}
