"""Where the processes that a launcher starts on its own machine find each other, without a free port to guess."""

from datetime import timedelta

import torch.distributed as dist


class MeetingPlace:
    """A store in the launcher's process, on a port that the system chose; open as long as this object lives."""

    def __init__(self, size: int, *, timeout: timedelta) -> None:
        self.size = size
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False
        )

    def variables(self, rank: int) -> dict[str, str]:
        """What the environment of a process must say."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's own word for: the launcher has the store
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
