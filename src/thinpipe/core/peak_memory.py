"""Peak memory of this process. For reporting only: where the platform has no exact value, an approximation is used."""

import re
import sys
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
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    elif sys.platform == "linux":  # noqa: RET505  mypy for one system skips the branches of the others
        # Not getrusage: on Linux ru_maxrss is inherited from the parent through fork and exec, so a small child of a
        # large parent would report the parent's peak. VmHWM is reset by exec.
        match = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text("utf-8"), re.MULTILINE)
        return None if match is None else int(match[1]) * 1024
    else:
        return None


def _resource_usage() -> int | None:
    if sys.platform == "win32":
        return None
    else:  # noqa: RET505
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _now() -> int:
    return int(psutil.Process().memory_info().rss)
