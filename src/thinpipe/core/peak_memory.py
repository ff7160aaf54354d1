"""Peak memory of this process. For reporting only: where the platform has no exact value, an approximation is used."""

import platform
import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_STATUS = Path("/proc/self/status")


def peak_resident_nbytes() -> int:
    """Peak resident set size of this process in bytes; 0 if unknown. Never raises."""
    for measure in (_high_water_mark, _resource_usage, _now):
        try:
            found = measure()
        except Exception:  # any of these sources may be missing in sandboxes and minimal systems
            continue
        if found:
            return found
    return 0


def _high_water_mark() -> int | None:
    if platform.system() == "Windows":
        return int(psutil.Process().memory_info().peak_wset)
    if platform.system() != "Linux":
        return None
    # Not getrusage: on Linux ru_maxrss is inherited from the parent through fork and exec, so a small child of a large
    # parent would report the parent's peak. VmHWM is reset by exec.
    match = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


def _resource_usage() -> int:
    import resource  # not on Windows

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _now() -> int:
    return int(psutil.Process().memory_info().rss)
