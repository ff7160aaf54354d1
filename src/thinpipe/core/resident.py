"""How much memory this process has ever held at once."""

import platform
import re
from pathlib import Path

import psutil  # type: ignore[import-untyped]


def peak_resident_nbytes() -> int:
    """The largest resident set this process ever had."""
    if platform.system() == "Windows":
        return int(psutil.Process().memory_info().peak_wset)
    if platform.system() == "Linux":
        # getrusage would do, but Linux carries its maximum over from the parent through fork and exec: a large parent
        # would hide a small child. VmHWM starts afresh.
        status = Path("/proc/self/status").read_text()
        match = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        if match is None:
            raise RuntimeError("/proc/self/status does not show VmHWM, the largest resident set")
        return int(match[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
