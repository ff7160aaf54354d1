"""Programs of a chaos run: started here or in a network of their own, and what they print, need and are worth."""

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

import psutil  # type: ignore[import-untyped]

_TAIL_NBYTES = 3000
_SET_PARENT_DEATH_SIGNAL = 1
_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class Use:
    """What a process has at a moment."""

    rss_nbytes: int
    handles: int


def _die_with_us() -> None:
    """In the child, before its program: should we be killed, nobody may go on and hold the folders."""
    assert _LIBRARY is not None
    _LIBRARY.prctl(_SET_PARENT_DEATH_SIGNAL, Signals.SIGKILL)


class Program:
    """A module of Python with one thread, in a process group of its own; what it prints is appended to a file."""

    def __init__(
        self,
        output: Path,
        module: str,
        arguments: Sequence[object],
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        output.parent.mkdir(parents=True, exist_ok=True)
        self.output, self.ended_by_us = output, False
        self._begins = output.stat().st_size if output.exists() else 0
        with output.open("ab") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", module, *map(str, arguments)],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_die_with_us if sys.platform == "linux" else None,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """By SIGSTOP."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    @property
    def printed(self) -> str:
        """By this process alone."""
        with self.output.open("rb") as file:
            file.seek(self._begins)
            return file.read().decode(errors="replace")

    @property
    def tail(self) -> str:
        return self.printed[-_TAIL_NBYTES:]

    def signal(self, number: Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def catches(self, number: Signals) -> bool:
        """Whether this signal would not simply end it."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.pid}/status").read_text()
            (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
            return bool(int(caught, 16) >> (number - 1) & 1)
        return False

    def kill(self, *, with_children: bool = False) -> None:
        """SIGKILL, as when the power fails."""
        self.ended_by_us = True
        children = descendants(self.pid) if with_children else []
        if self.running:
            self.process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait(timeout=30)


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def use_of(pid: int) -> Use | None:
    """None when it is gone."""
    try:
        process = psutil.Process(pid)
        return Use(rss_nbytes=process.memory_info().rss, handles=process.num_fds())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
