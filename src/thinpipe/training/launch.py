"""Entry point of a run: trains in this process (also as a worker of `torchrun`), or launches one local process per
pipeline rank.

The launcher imports no torch. When one process fails, all are ended, and the launcher raises the earliest error.
"""

import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from thinpipe.config.boundary import refuse_registered_compressors
from thinpipe.config.run import RunConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import DECODE_ERRORS, RunFailedError, UserError
from thinpipe.core.events import AnyEvent
from thinpipe.core.files import write_atomically
from thinpipe.core.folder_lock import FolderLock, run_lock
from thinpipe.core.log_tail import Tail
from thinpipe.core.process_group import NEW_PROCESS_GROUP
from thinpipe.core.run_folder import events_path
from thinpipe.core.status_line import status_line
from thinpipe.training.error_file import ERROR_FILE_VARIABLE, ErrorReport
from thinpipe.training.graceful_shutdown import follow_parent, install_handler, restore_handlers
from thinpipe.training.memory_check import check_before_torch
from thinpipe.training.observer import FAILED, Observer
from thinpipe.transport.rendezvous import local_group

_LOG = logging.getLogger(__name__)
_GRACE_SECONDS = 10.0
"""Seconds that the other processes have to exit after one failed, before they are killed."""
_IN_USE_BY = (
    "another `thinpipe train` or a hub, and two runs in one folder would overwrite each other's checkpoints: wait "
    "until the other run ends, stop it (Ctrl+C), or choose another folder with --job.dump-folder"
)


def train(config: RunConfig, observer: Observer) -> None:
    """Runs training; `observer` gets the events of this process, or of process 0 of those that it launches.

    Raises UserError for wrong settings, RunFailedError if one of several processes failed, and the exception that a
    callback of `observer` has raised.
    """
    degree, started = config.parallelism.pipeline_parallel_degree, os.environ.get("WORLD_SIZE")
    if started is not None and int(started) != degree:
        raise UserError(
            f"{started} processes were started (WORLD_SIZE), but parallelism.pipeline_parallel_degree is {degree}: "
            f"add --parallelism.pipeline-parallel-degree {started}"
        )
    if ERROR_FILE_VARIABLE in os.environ:
        # On Windows, libraries that look at standard input when they are loaded would wait for a thread that reads it.
        with status_line("loading torch"):
            importlib.import_module("thinpipe.training.process")
        follow_parent()
    else:
        check_before_torch(config)
    with _hold_run_lock(config.job.dump_folder) as lock:
        if degree > 1 and started is None:
            launch(config, degree, lock, observer)
        else:
            with status_line("loading torch"):  # the launcher needs none
                process = importlib.import_module("thinpipe.training.process")
            process.train(config, observer, in_group=degree > 1)
    observer.raise_error()


@contextmanager
def _hold_run_lock(folder: Path) -> Iterator[FolderLock | None]:
    """Holds the exclusive lock on the run folder.

    One process per run takes the lock: the local launcher, whose workers inherit it, or rank 0 under `torchrun`. The
    other processes take none (yields None), because machines may share the folder.
    """
    if ERROR_FILE_VARIABLE in os.environ or os.environ.get("RANK", "0") != "0":
        yield None
        return
    with run_lock(folder, _IN_USE_BY) as lock:
        yield lock


@dataclass(frozen=True)
class Worker:
    """A process started by the local launcher."""

    process: subprocess.Popen[bytes]
    error_file: Path
    log: Path | None
    """File with the output of the process; None if it prints to this console."""

    def request_stop(self, number: int) -> None:
        """Sends the signal of this number, through a pipe: Windows knows no signals between processes."""
        assert self.process.stdin is not None
        with suppress(OSError):  # the process has ended
            self.process.stdin.write(bytes([number]))


def launch(config: RunConfig, degree: int, lock: FolderLock | None, observer: Observer) -> None:
    """Starts `degree` processes on this machine and waits for them.

    Raises what a callback of `observer` has raised, else UserError or RunFailedError, if a process failed.
    Process 0 prints to the console, unless `observer` is quiet, the others to log files in the run folder.
    """
    refuse_registered_compressors(config.boundary, "processes that `train` starts")
    folder = config.job.dump_folder / "processes"
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "run.toml"
    write_atomically(settings, dump_toml(config).encode())
    threads = str(max(1, (os.cpu_count() or 1) // degree))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    workers: list[Worker] = []
    inherited = lock.inheritable if lock else ()
    events = _EventReader(events_path(config.job.dump_folder), observer)
    signals = _StopSignals(workers, observer)
    with signals.forwarded():
        for rank, variables in enumerate(local_group(degree, folder / "store-port")):
            log = folder / f"process-{rank}.log" if rank or observer.quiet else None
            workers.append(_start(settings, folder, rank, environment | variables, inherited, log))
        failed = _watch(workers, events, signals)
        if failed is not None and observer.stop_reason not in FAILED:
            try:
                raise _failure(workers, failed)
            finally:
                observer.raise_error()  # in place of the failure, which is then its context


class _EventReader:
    """Passes the events that the processes append to the log of the run to the observer."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self.observer, self._tail = observer, Tail(path)
        self._decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)

    def read(self) -> None:
        for encoded in self._tail.lines():
            with suppress(*DECODE_ERRORS):  # truncated by a full disk
                self.observer.on_event(self._decoder.decode(encoded))


def _start(
    settings: Path,
    folder: Path,
    rank: int,
    environment: Mapping[str, str],
    inherited: tuple[int, ...],
    log: Path | None,
) -> Worker:
    error_file = folder / f"error-{rank}.json"
    error_file.unlink(missing_ok=True)
    output = log.open("wb") if log else None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "thinpipe", "train", str(settings)],
            env={**environment, ERROR_FILE_VARIABLE: str(error_file)},
            bufsize=0,
            stdin=subprocess.PIPE,  # for signals; closed when the launcher dies, which the process takes as SIGTERM
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
            pass_fds=inherited,  # if the launcher is killed, the run lock is held until the last process ends
            process_group=0,  # Ctrl+C reaches only the launcher, which forwards it
            creationflags=NEW_PROCESS_GROUP,
        )
    finally:
        if output:
            output.close()
    return Worker(process, error_file, log)


class _StopSignals:
    """Signals for the workers: those that the launcher gets (in the main thread, which alone gets them), and the stop
    request of an observer.

    The first one goes to worker 0 only, because stop requests are shared in the all-reduce of the step, and worker 0
    gets no second one unless the user insists: a second signal ends a worker at once, even while it saves. Later
    signals to the launcher go to all workers.
    """

    def __init__(self, workers: list[Worker], observer: Observer) -> None:
        self._workers, self._observer = workers, observer
        self._sent = self._received = False

    @contextmanager
    def forwarded(self) -> Iterator[None]:
        """Forwards signals to the workers, and kills the workers that are left on exit."""
        previous = install_handler(self._forward)
        try:
            yield
        finally:
            restore_handlers(previous)
            for worker in self._workers:
                if worker.process.poll() is None:
                    worker.process.kill()
                worker.process.wait()
                assert worker.process.stdin is not None
                worker.process.stdin.close()

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._received:
            for worker in self._workers:
                worker.request_stop(number)
            return
        self._received, self._observer.stop_signal = True, signal.Signals(number)
        self.pass_on()

    def pass_on(self) -> None:
        """Asks worker 0 to stop, once, if a signal or the observer wants that and the run has not stopped yet."""
        wanted = self._observer.stop_signal or (signal.SIGTERM if self._observer.asked_to_stop() else None)
        if wanted is None or self._sent or self._observer.stop_reason is not None or not self._workers:
            return
        self._sent = True
        self._workers[0].request_stop(wanted)


def _watch(workers: list[Worker], events: _EventReader, signals: _StopSignals) -> Worker | None:
    """Waits until all workers have exited, or for the grace period after one failed; returns the first that failed."""
    while all(worker.process.poll() in (None, 0) for worker in workers):
        ended = all(worker.process.poll() == 0 for worker in workers)
        events.read()
        if ended:
            return None
        signals.pass_on()
        time.sleep(0.05)
    first = next(worker for worker in workers if worker.process.poll() not in (None, 0))
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(worker.process.poll() is None for worker in workers):
        time.sleep(0.05)
    for rank, worker in enumerate(workers):
        if worker.process.poll() is None:
            _LOG.warning("process %d did not end within %g s and is killed", rank, _GRACE_SECONDS)
    events.read()
    return first


def _failure(workers: list[Worker], first: Worker) -> Exception:
    """The exception that says why the run failed.

    The cause is a worker killed by a signal, else the oldest error file, where a report about another process counts
    only if that process has written none. Without either, the workers have printed their own errors.
    """
    killed = next(
        (w for w in workers if (code := w.process.poll()) is not None and code < 0 and not w.error_file.exists()),
        None,
    )
    if killed is not None:
        name = signal.Signals(-(killed.process.returncode or 0)).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        place = f"process {workers.index(killed)}"
        return RunFailedError(f"{place} was ended by {name}{hint}. Run the same command again to resume")
    reports = [(worker, _read_report(worker)) for worker in workers if worker.error_file.exists()]
    if not reports:
        more = f": see {first.log}" if first.log else ""
        text = f"process {workers.index(first)} failed with exit code {first.process.returncode}{more}"
        return RunFailedError(text, reported=first.log is None)
    origin, report = min(reports, key=lambda pair: (pair[1].in_other_process, pair[0].error_file.stat().st_mtime_ns))
    more = f" (full output of the process: {origin.log})" if origin.log and not report.user_error else ""
    return UserError(report.text) if report.user_error else RunFailedError(f"{report.text}{more}")


def _read_report(worker: Worker) -> ErrorReport:
    return msgspec.json.decode(worker.error_file.read_bytes(), type=ErrorReport)
