"""What a run has from elsewhere than its own folder. Alone it has nothing; whoever joins a run has it from the hub."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch.distributed as dist

from thinpipe.core.events import AnyEvent
from thinpipe.train.tokens import TokenSource
from thinpipe.transport.star import Exchange, exchange_of


class Supplies:
    """All from this machine. In a run that was joined, another one overrides what it has."""

    tokens: TokenSource | None = None
    """None: the folder that the settings name."""

    def exchange(self, group: dist.ProcessGroup | None) -> Exchange:
        """By which the processes of the run tell each other their norms, losses and votes."""
        return exchange_of(group)

    def step(self) -> AbstractContextManager[None]:
        """Around every step: what takes longer than ever in it is taken for hanging."""
        return nullcontext()

    def fetch(self, layers: Collection[str], if_saved: Collection[str]) -> None:
        """Puts these layers of the checkpoint to go on from into the run's folder; some need not be in it."""

    def ready(self, hashes: Mapping[str, str]) -> None:
        """Raises UserError when what everybody must have alike is not so."""

    def heard(self, event: AnyEvent) -> None:
        """After the console and the log."""

    def name_of(self, process: int) -> str:
        return f"process {process}"

    def may_accuse(self, step: int) -> bool:  # noqa: ARG002
        """There is somebody who can remove a process that is wrong twice in this step. Else it is skipped."""
        return False

    def needed(self) -> Collection[Path]:
        """Checkpoints that must not be removed yet."""
        return ()

    def asked_to_stop(self) -> bool:
        """By somebody else than who sits here."""
        return False
