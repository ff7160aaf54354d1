"""Network namespaces of the kernel: commands in them, this thread in them, and their end. Linux and root only."""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path("/run/netns")
_END_SECONDS = 5.0


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


@contextlib.contextmanager
def inside(name: str) -> Iterator[None]:
    """This thread is there, and what it begins: sockets, threads and processes stay there when it has left."""
    with open("/proc/thread-self/ns/net") as home, open(_FOLDER / name) as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(home.fileno())


def counters(name: str, device: str) -> dict[str, int]:
    """Bytes and packets that an interface has sent (tx) and received (rx), Ethernet headers included; no process."""
    with inside(name):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (numbers,) = (line.split(":")[1].split() for line in lines if line.split(":")[0].strip() == device)
    columns = {"rx": numbers[:4], "tx": numbers[8:12]}
    return {
        f"{direction}_{what}": int(columns[direction][column])
        for direction in ("tx", "rx")
        for what, column in (("bytes", 0), ("packets", 1), ("dropped", 3))
    }


def remove(name: str) -> None:
    """With every process in it, also those that its programs have started."""
    deadline = time.monotonic() + _END_SECONDS
    while time.monotonic() < deadline and (processes := _processes(name)):
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False, timeout=30)


def _processes(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False, timeout=30)
    # A thread of ours that stays there is an error of the test, and no reason to end it all.
    return [int(process) for process in found.stdout.split() if int(process) != os.getpid()]


def _enter(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
