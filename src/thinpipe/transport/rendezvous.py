"""Rendezvous of the processes that a launcher starts on its own machine, on a port that the system chooses.

Process 0 listens on the loopback address, torch's store serves on that socket, and a file tells its port to the others.
Nothing is inherited from the launcher, because processes on Windows inherit no sockets. No torch is needed here.
"""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

from thinpipe.core.files import write_atomically

ADDRESS = "127.0.0.1"
PORT_FILE = "THINPIPE_STORE_PORT_FILE"
"""Environment variable set by the local launcher: file to which process 0 writes the port of the store."""

_POLL_SECONDS = 0.02


def local_group(size: int, port_file: Path) -> list[dict[str, str]]:
    """Environment variables with which each of `size` processes on this machine finds the others. Removes the port file
    of an earlier group: call it before the first of the processes starts."""
    port_file.unlink(missing_ok=True)
    return [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            PORT_FILE: str(port_file.absolute()),
        }
        for rank in range(size)
    ]


def listen(size: int) -> socket.socket:
    """Listening socket of process 0, which waits for `size` connections."""
    listening = socket.create_server((ADDRESS, 0), backlog=max(128, size))
    write_atomically(Path(os.environ[PORT_FILE]), str(listening.getsockname()[1]).encode())
    return listening


def wait_for_port(timeout: timedelta) -> int:
    """Port on which process 0 listens. Raises ConnectionError if process 0 does not within `timeout`."""
    file, deadline = Path(os.environ[PORT_FILE]), time.monotonic() + timeout.total_seconds()
    while not file.exists():
        if time.monotonic() > deadline:
            raise ConnectionError(f"process 0 has not started within {timeout.total_seconds():g} s")
        time.sleep(_POLL_SECONDS)
    return int(file.read_bytes())
