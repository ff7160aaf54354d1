"""`thinpipe train`: in this process, as one of those that `torchrun` started, or with local processes of its own.

A launcher of local processes imports no torch. When one process ends badly, all end, and the first error is what a
person reads last.
"""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from thinpipe.core.config import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.swarm.lock import FolderLock
from thinpipe.train.alone import alone_in
from thinpipe.train.config import RunConfig
from thinpipe.train.failure import ERROR_FILE, Failure
from thinpipe.train.stopping import SIGNALS
from thinpipe.transport.rendezvous import Rendezvous

_GRACE_SECONDS = 10.0
"""For the other processes to notice that one is gone."""
_IN_USE_BY = (
    "another `thinpipe train` or a hub, and two would write over each other's checkpoints: wait for it or stop it "
    "(Ctrl+C), or give this run a folder of its own with --job.dump-folder"
)


def run(config: RunConfig) -> int:
    """Exit code 1 when the run had to give up, 2 when what was asked for makes no sense."""
    degree, started = config.parallelism.pipeline_parallel_degree, os.environ.get("WORLD_SIZE")
    if started is not None and int(started) != degree:
        raise UserError(
            f"{started} processes were started, and parallelism.pipeline_parallel_degree is {degree}: "
            f"add --parallelism.pipeline-parallel-degree {started}"
        )
    with _only_one(config.job.dump_folder) as lock:
        if degree > 1 and started is None:
            return launch(config, degree, lock)
        process = importlib.import_module("thinpipe.train.process")  # torch takes seconds, and a launcher needs none
        code: int = process.train(config, in_group=degree > 1)
        return code


@contextmanager
def _only_one(folder: Path) -> Iterator[FolderLock | None]:
    """Keeps other runs out of the folder. Of the processes of one run one has the lock: their launcher, who lets them
    inherit it, or the first that `torchrun` started, for machines may share one folder."""
    if ERROR_FILE in os.environ or os.environ.get("RANK", "0") != "0":
        yield None
        return
    with alone_in(folder, _IN_USE_BY) as lock:
        yield lock


@dataclass(frozen=True)
class Worker:
    process: subprocess.Popen[bytes]
    note: Path
    log: Path | None
    """What it prints, if not on this console."""


def launch(config: RunConfig, degree: int, lock: FolderLock | None) -> int:
    """Processes on this machine; process 0 has the console, the others write into the run's folder."""
    folder = config.job.dump_folder / "processes"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "run.toml"
    write_atomically(settings, dump_toml(config).encode())
    threads = str(max(1, (os.cpu_count() or 1) // degree))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    workers: list[Worker] = []
    inherited = lock.inheritable if lock else ()
    with _signals_to(workers):
        with Rendezvous(degree) as rendezvous:
            for rank in range(degree):
                variables, descriptors = rendezvous.variables(rank), inherited + rendezvous.inherited_by(rank)
                workers.append(_start(settings, folder, rank, environment | variables, descriptors))
        return _watch(workers)


def _start(
    settings: Path, folder: Path, rank: int, environment: Mapping[str, str], inherited: tuple[int, ...]
) -> Worker:
    note, log = folder / f"error-{rank}.json", folder / f"process-{rank}.log" if rank else None
    note.unlink(missing_ok=True)
    output = log.open("wb") if log else None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "thinpipe", "train", str(settings)],
            env={**environment, ERROR_FILE: str(note)},
            stdin=subprocess.PIPE,  # stays open as long as this process lives
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=inherited,  # should this process be killed, the folder is free when the last of them has ended
            process_group=0,  # Ctrl+C reaches this process alone, which passes it on
        )
    finally:
        if output:
            output.close()
    return Worker(process, note, log)


@contextmanager
def _signals_to(workers: list[Worker]) -> Iterator[None]:
    """One is enough: the processes tell each other. A second one is meant for all."""
    received = 0

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        for worker in workers[: 1 if received == 1 else None]:
            worker.process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for worker in workers:
            if worker.process.poll() is None:
                worker.process.kill()


def _watch(workers: list[Worker]) -> int:
    while all(worker.process.poll() in (None, 0) for worker in workers):
        if all(worker.process.poll() == 0 for worker in workers):
            return 0
        time.sleep(0.05)
    first = next(worker for worker in workers if worker.process.poll() not in (None, 0))
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(0.05)
    return _explain(workers, first)


def _explain(workers: list[Worker], first: Worker) -> int:
    """Says why the run ended: someone was killed, or wrote the first note; else each process has said it itself."""
    killed = next(
        (w for w in workers if (code := w.process.poll()) is not None and code < 0 and not w.note.exists()), None
    )
    if killed is not None:
        name = signal.Signals(-(killed.process.returncode or 0)).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        place = f"process {workers.index(killed)}"
        print(f"thinpipe: {place} was ended by {name}{hint}. Run the same command to go on", file=sys.stderr)
        return 1
    written = [worker for worker in workers if worker.note.exists()]
    if not written:
        return first.process.returncode or 1
    origin = min(written, key=lambda worker: worker.note.stat().st_mtime_ns)
    failure = msgspec.json.decode(origin.note.read_bytes(), type=Failure)
    more = f" (all it printed: {origin.log})" if origin.log and not failure.user_error else ""
    print(f"thinpipe: {failure.text}{more}", file=sys.stderr)
    return 2 if failure.user_error else 1
