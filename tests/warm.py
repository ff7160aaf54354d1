"""Warm starts: programs of the test suite in processes that are forked from one that has torch imported.

Importing torch and the trainer takes three seconds of processor time, most of a short program's life. multiprocessing's
fork server imports them once for each test worker; its children are processes like any other, with a command line, an
environment, an output and a process group of their own. The server has no thread but its main one, so a fork is safe.
Cold starts stay where the start or the end of an interpreter is tested: the command line, launchers, wheels, the quick
start. Linux only: macOS cannot fork a process that has loaded Apple's libraries, and Windows cannot fork.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

from thinpipe.core.process_group import NEW_PROCESS_GROUP

_ROOT = Path(__file__).parents[1]

if sys.platform == "linux":
    _CONTEXT = multiprocessing.get_context("forkserver")
    _CONTEXT.set_forkserver_preload(["tests.warm_imports"])


class WarmProcess:
    """`python -m module arguments...`, as much of `subprocess.Popen` as tests use."""

    def __init__(
        self, module, *arguments, stdout, stderr=subprocess.STDOUT, env=None, cwd=None, process_group=None, text=True
    ):
        """`stdout` is an open file or subprocess.PIPE, `stderr` subprocess.STDOUT or subprocess.PIPE."""
        self.args = [sys.executable, "-m", module, *map(str, arguments)]
        how = {"environment": dict(os.environ if env is None else env), "cwd": str(cwd or Path.cwd())}
        with _Output(stdout, text) as output, _Output(stderr, text) as errors:
            self.stdout, self.stderr = output.reading, errors.reading
            ends = output.writing, errors.writing if stderr == subprocess.PIPE else output.writing
            arguments = (module, self.args[3:], *ends, process_group)
            self._process = _CONTEXT.Process(target=_run, args=arguments, kwargs=how, daemon=True)
            _ensure_server()
            self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def communicate(self, timeout=None):
        """All that it printed and nobody has read, once it has ended; nothing more when asked again."""
        deadline = None if timeout is None else time.monotonic() + timeout
        files, read = [file for file in (self.stdout, self.stderr) if file is not None and not file.closed], {}
        readers = [threading.Thread(target=lambda file=file: read.update({file: file.read()})) for file in files]
        for reader in readers:
            reader.daemon = True
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        for file in files:
            file.close()
        return read.get(self.stdout), read.get(self.stderr)

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


if sys.platform != "linux":

    class WarmProcess(subprocess.Popen):
        """`python -m module arguments...`, started cold."""

        def __init__(self, module, *arguments, stderr=subprocess.STDOUT, process_group=None, text=True, **how):
            command = [sys.executable, "-m", module, *map(str, arguments)]
            flags = 0 if process_group is None else NEW_PROCESS_GROUP
            super().__init__(command, stderr=stderr, process_group=process_group, creationflags=flags, text=text, **how)


def run_warm(module, *arguments, timeout, **how):
    """As `subprocess.run` with both outputs captured as text."""
    process = WarmProcess(module, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **how)
    try:
        stdout, stderr = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _ensure_server():
    """Starts the fork server of this test worker if it does not run yet. A test may have changed the folder, and the
    server has to find `tests` all the same."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_ROOT), *filter(None, [before])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class _Output:
    """Where a program prints: `writing` for the program, `reading` for us if it is a pipe."""

    def __init__(self, wanted, text):
        self.reading = self.writing = None
        if wanted == subprocess.PIPE:
            reading, writing = os.pipe()
            self.reading, self.writing = os.fdopen(reading, "r" if text else "rb"), Connection(writing)
        elif wanted != subprocess.STDOUT:
            self.writing = Connection(os.dup(wanted.fileno()))

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        if self.writing is not None:
            self.writing.close()


def _load_backends(path):
    """As `import torch` would: backends that packages in the folders of PYTHONPATH name (see `tests.device.sim`)."""
    folders = [folder for folder in path.split(os.pathsep) if folder and folder not in sys.path]
    sys.path[:0] = folders
    if any(next(Path(folder).glob("*.dist-info"), None) for folder in folders):
        import torch

        torch._import_device_backends()


def _run(module, arguments, output, errors, process_group, *, environment, cwd):
    """In the new process: everything as `python -m module` would find it, then the module."""
    if process_group is not None:
        os.setpgid(0, process_group)
    os.dup2(output.fileno(), 1)
    os.dup2(errors.fileno(), 2)
    output.close()
    if errors is not output:
        errors.close()
    warm = sys.modules.get("tests.warm_imports")
    assert warm is not None, "the fork server has not imported tests.warm_imports"
    assert warm.THREADS == 1, f"the fork server had {warm.THREADS} threads, and only one survives a fork"
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _load_backends(environment.get("PYTHONPATH", ""))
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # what an interpreter does at its end, and multiprocessing leaves out
        atexit._run_exitfuncs()
