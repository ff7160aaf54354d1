"""Runs a server for as long as its starter lives. A program of its own: `python keeper.py LOCK_FD COMMAND...`

The starter holds the other end of our standard input. When it ends, in whatever way, the system closes that end; we
read the end of the file and stop the server. No signal handler, no exit hook, and the starter may have any threads.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

_GRACE_SECONDS = 5.0
_SET_PARENT_DEATH_SIGNAL = 1


def main(arguments: list[str]) -> int:
    lock, *command = arguments
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        pass_fds=() if lock == "-" else (int(lock),),
        # Sound here: this process has one thread so far, and that one lasts as long as the process.
        preexec_fn=_dies_with(os.getpid()) if sys.platform == "linux" else None,
    )
    threading.Thread(target=_stop_when_left, args=(server,), daemon=True).start()
    return server.wait()


def _dies_with(keeper: int) -> Callable[[], None]:
    """What a child does before it becomes the server, in case someone kills the keeper itself."""
    control = ctypes.CDLL(None).prctl

    def in_child() -> None:
        control(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)

    return in_child


def _stop_when_left(server: subprocess.Popen[bytes]) -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    server.terminate()
    try:
        server.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
