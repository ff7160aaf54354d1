"""Rendezvous of the processes that a launcher starts on its own machine, on a port that the system chooses.

The launcher needs no torch for it: it opens the listening socket, and process 0 serves torch's store on that socket.
"""

import socket
from types import TracebackType
from typing import Self

STORE_FD = "THINPIPE_STORE_FD"
"""Environment variable set by the local launcher: file descriptor of the inherited listening socket for process 0,
empty for the others."""


class Rendezvous:
    """Listening socket for the torch store of `size` processes.

    The launcher must close its copy once process 0 has inherited the socket: then connections are refused at once if
    process 0 is gone.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=max(128, size))

    def variables(self, rank: int) -> dict[str, str]:
        """Environment variables with which the process of this rank finds the others."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._socket.getsockname()[1]),
            STORE_FD: str(self._socket.fileno()) if rank == 0 else "",
        }

    def inherited_by(self, rank: int) -> tuple[int, ...]:
        """File descriptors that the process of this rank must inherit (`pass_fds`)."""
        return (self._socket.fileno(),) if rank == 0 else ()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
