"""What a hub must be given of the run that it hosts. The hub itself knows nothing of models, data or settings."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from thinpipe.core.events import AnyEvent
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.assign import Assignment, Machine
from thinpipe.swarm.file_service import Accepted
from thinpipe.swarm.messages import Give, Measure, Verdict
from thinpipe.swarm.roster import Epoch


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What peers need to begin an epoch."""

    settings: str
    manifest: bytes
    facts: bytes
    tokenizer: list[str]
    keep_bytes_per_second: dict[str, float]
    """How fast each peer may send what it saves."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What an epoch will be like, as far as was measured."""

    tokens_per_second: float
    """That the slowest part allows."""
    up_bps: Sequence[float]
    """Of each peer."""
    hub_down_bps: float
    latency_s: float
    """The longest round trip."""


class Hosted(Protocol):
    numerics: Numerics
    """What the hub computes by, and its peers must."""

    measure: Measure
    """What peers are told to measure."""

    def assign(self, machines: Sequence[Machine], hub_up_bps: float, hub_down_bps: float) -> Assignment:
        """Raises UserError, which says how much memory is missing, when the machines cannot hold the model."""
        ...

    def begin(self, epoch: Epoch, outlook: Outlook | None = None) -> Beginning:
        """From the newest commit. Called once for every epoch."""
        ...

    def newest_manifest(self) -> bytes:
        """Of the newest commit."""
        ...

    @property
    def missing(self) -> Mapping[str, str]:
        """Files of the newest checkpoint that are not here, with the sha256 that each must have."""
        ...

    async def look(self) -> None:
        """Reads all of the newest checkpoint to see what is missing."""
        ...

    def give(self) -> Give:
        """What peers are asked for, when something is missing."""
        ...

    def what_is_missing(self, present: Collection[str], away: Collection[str]) -> str:
        """In words, with who could have it."""
        ...

    def fall_back(self, present: Collection[str], away: Collection[str]) -> str:
        """To the checkpoint before, because nobody gives what is missing; what was done. `look` comes next."""
        ...

    @property
    def commits(self) -> str:
        """How often, and how much work can be lost, in words; empty when no epoch has begun."""
        ...

    def news(self) -> list[str]:
        """Lines that people should read, each once."""
        ...

    def compare(self, hashes: Mapping[str, str]) -> str:
        """What a peer has with what the hub has: the first field that differs, in words; empty if none does."""
        ...

    def find(self, name: str) -> Path | None:
        """The file of this name that peers may fetch."""
        ...

    def saved(self, peer: str, epoch: int, manifest: bytes, files: Collection[str]) -> Verdict:
        """A peer of this epoch has its part of this checkpoint and sends these files next, if it may. What is not of
        the epoch that began last is refused."""
        ...

    def gone(self, peer: str) -> None:
        """It is lost, has left, or was started again."""
        ...

    def accept(self, peer: str, name: str) -> Accepted | None: ...

    def kept(self, peer: str, name: str) -> None: ...

    def not_kept(self, peer: str, name: str, why: str) -> None:
        """The hub could not write it."""
        ...

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
