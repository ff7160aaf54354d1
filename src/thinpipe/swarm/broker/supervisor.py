"""Runs a server process for as long as the process that started it lives: `python supervisor.py LOCK_FD COMMAND...`

A separate program. The starting process holds the write end of this program's standard input; when the starting process
ends, however it ends, the system closes that end, and the end of file here stops the server. This needs no signal
handler and no exit hook, and works whatever threads the starting process has.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

_GRACE_SECONDS = 5.0
"""Seconds between terminating and killing the server."""
_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code. The lock's file descriptor, or "-", is passed on to the server."""
    lock, *command = arguments
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=() if lock == "-" else (int(lock),),
        # preexec_fn is safe here: this process has a single thread so far. That thread lasts as long as the process,
        # and the parent-death signal is sent when the thread that started the server ends.
        preexec_fn=_die_with_parent(os.getpid()),
    )
    threading.Thread(target=_stop_on_eof, args=(server,), daemon=True).start()
    return server.wait()


def _die_with_parent(supervisor: int) -> Callable[[], None] | None:
    """Function for the child process before it executes the server: the server is killed if the supervisor is killed.
    None on other systems than Linux, which have no such thing."""
    if sys.platform == "linux":
        control = ctypes.CDLL(None).prctl

        def in_child() -> None:
            control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
            if os.getppid() != supervisor:
                os._exit(1)

        return in_child
    else:  # noqa: RET505
        return None


def _stop_on_eof(server: subprocess.Popen[bytes]) -> None:
    """Thread: waits for the end of standard input, then terminates the server."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    server.terminate()
    try:
        server.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
