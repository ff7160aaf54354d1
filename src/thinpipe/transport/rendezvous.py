"""Rendezvous of the processes that a launcher starts on its own machine, on a port that the system chooses.

The launcher needs no torch for it: it opens the listening socket, and process 0 serves torch's store on that socket.
"""

import socket
from types import TracebackType
from typing import Self

STORE_FD = "THINPIPE_STORE_FD"
"""Environment variable of the processes of a local launcher: for process 0 the descriptor of the listening socket that
it inherits, and nothing for the others."""


class Rendezvous:
    """A listening socket for the store of `size` processes. Close it once process 0 has inherited it, so that a
    process that looks for a store whose owner is gone is refused at once."""

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
