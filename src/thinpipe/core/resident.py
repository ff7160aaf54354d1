"""How much memory this process has ever held at once. It is only told, never needed: where the system does not say it,
something close to it is told instead."""

import platform
import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_STATUS = Path("/proc/self/status")


def peak_resident_nbytes() -> int:
    """The largest resident set this process ever had; 0 where nothing is known. Never raises."""
    for measure in (_high_water_mark, _resource_usage, _now):
        try:
            found = measure()
        except Exception:  # sandboxes and small systems leave out any of these
            continue
        if found:
            return found
    return 0


def _high_water_mark() -> int | None:
    if platform.system() == "Windows":
        return int(psutil.Process().memory_info().peak_wset)
    if platform.system() != "Linux":
        return None
    # getrusage would do, but Linux carries its maximum over from the parent through fork and exec: a large parent
    # would hide a small child. VmHWM starts afresh.
    match = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    return None if match is None else int(match[1]) * 1024


def _resource_usage() -> int:
    import resource  # not on Windows

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _now() -> int:
    return int(psutil.Process().memory_info().rss)
