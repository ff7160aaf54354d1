"""What a hub must be given of the run that it hosts. The hub itself knows nothing of models, data or settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from thinpipe.core.events import AnyEvent
from thinpipe.swarm.assign import Assignment, Machine
from thinpipe.swarm.file_service import Accepted
from thinpipe.swarm.messages import Measure, Verdict
from thinpipe.swarm.roster import Epoch


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What peers need to begin an epoch."""

    settings: str
    manifest: bytes
    facts: bytes
    tokenizer: list[str]


class Hosted(Protocol):
    code: str
    """Which thinpipe this is: peers must run the same."""

    measure: Measure
    """What peers are told to measure."""

    def assign(self, machines: Sequence[Machine], hub_up_bps: float, hub_down_bps: float) -> Assignment:
        """Raises UserError, which says how much memory is missing, when the machines cannot hold the model."""
        ...

    def begin(self, epoch: Epoch) -> Beginning:
        """From the newest commit. Called once for every epoch."""
        ...

    def newest_manifest(self) -> bytes:
        """Of the newest whole checkpoint."""
        ...

    def compare(self, hashes: Mapping[str, str]) -> str:
        """What a peer has with what the hub has: the first field that differs, in words; empty if none does."""
        ...

    def find(self, name: str) -> Path | None:
        """The file of this name that peers may fetch."""
        ...

    def saved(self, peer: str, epoch: int, manifest: bytes) -> Verdict:
        """A peer of this epoch has its part of this checkpoint and sends its files next, if it may. What is not of the
        epoch that began last is refused."""
        ...

    def accept(self, peer: str, name: str) -> Accepted | None: ...

    def kept(self, peer: str, name: str) -> None: ...

    def tokens(self, split: str, index: int) -> bytes:
        """Raises IndexError."""
        ...

    def heard(self, event: AnyEvent) -> None: ...

    @property
    def committed(self) -> int:
        """The step of the newest commit; 0: none yet."""
        ...

    @property
    def ended(self) -> str:
        """Why the run has ended, in words; empty while it goes on."""
        ...

    @property
    def progress(self) -> Mapping[str, float]:
        """Numbers for `thinpipe status`: step, steps, loss, tokens_per_second."""
        ...
