"""Interface between the hub, which knows nothing of models, data or settings, and the run that it hosts."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from thinpipe.core.events import AnyEvent
from thinpipe.core.exactness import Exactness
from thinpipe.core.hub_events import HubEvent, RolledBack
from thinpipe.core.numerics import Numerics
from thinpipe.planning.partition import Machine, Partition
from thinpipe.swarm.hub.replica import Generation
from thinpipe.swarm.hub.services.files import ExpectedFile, FileRange
from thinpipe.swarm.hub.step_record import StepLayout
from thinpipe.swarm.protocol.messages import AnnouncementReply, CheckpointAnnouncement, Measure, RestoreFiles
from thinpipe.swarm.protocol.signed_files import SignedFile


@dataclass(frozen=True, kw_only=True)
class GenerationStart:
    """What peers need to begin a generation; see the fields of `messages.Assignment`."""

    settings: str
    manifest: bytes
    dataset_info: bytes
    tokenizer: list[str]
    upload_bytes_per_second: dict[str, float]
    """Upload rate limit for checkpoints, in bytes per second by peer name; empty: unlimited."""
    step_layout: StepLayout
    """How the hub reads the sums of the generation's steps."""


@dataclass(frozen=True, kw_only=True)
class GenerationForecast:
    """Expected speed of a generation, from measurements of its peers."""

    tokens_per_second: float
    """Throughput of the slowest part of the pipeline."""
    up_bps: Sequence[float]
    """Uplink rate of each peer in bits per second, in pipeline order."""
    hub_down_bps: float
    """Downlink rate of the hub in bits per second."""
    down_bps: Sequence[float]
    """Downlink rate of each peer in bits per second, in pipeline order."""
    hub_up_bps: float
    """Uplink rate of the hub in bits per second."""
    latency_s: float
    """Longest round-trip time between a peer and the hub, in seconds."""


class RunHost(Protocol):
    """The run hosted by a hub: partitions, checkpoints, data and events. `TrainingHost` implements it."""

    numerics: Numerics
    """Numerics and torch version of the hub, which all peers must share."""

    exactness: Exactness
    """Whether the run is still bit for bit that of an undisturbed one."""

    measure: Measure
    """The `Measure` message for peers without a report."""

    who_reads: str
    """Who can read the data, in one sentence."""

    def make_partition(self, machines: Sequence[Machine], hub_up_bps: float, hub_down_bps: float) -> Partition:
        """Partitions the model over machines; rates in bits per second. Raises UserError, which says how much memory is
        missing, when the model does not fit."""
        ...

    def begin(self, generation: Generation, forecast: GenerationForecast | None = None) -> GenerationStart:
        """Begins a generation from the newest commit. Called once per generation."""
        ...

    def newest_manifest(self) -> bytes:
        """Manifest (JSON) of the newest commit."""
        ...

    @property
    def missing(self) -> Mapping[str, str]:
        """sha256 of each file of the newest checkpoint that is missing at the hub, by file name."""
        ...

    async def verify_newest(self) -> None:
        """Reads all files of the newest checkpoint and updates `missing`."""
        ...

    def restore_request(self) -> RestoreFiles:
        """The request to peers for the missing files."""
        ...

    def describe_missing(self, present: Collection[str], absent: Collection[str]) -> str:
        """The missing files and the peers that should hold copies, in words."""
        ...

    def roll_back(self, present: Collection[str], absent: Collection[str]) -> RolledBack | str:
        """Falls back to the previous checkpoint because no peer has the missing files; the caller runs `verify_newest`
        next. Returns the event, or why there is no checkpoint to fall back to, in words."""
        ...

    @property
    def commit_plan(self) -> str:
        """How often commits should come, in words; empty before the first generation."""
        ...

    @property
    def commit_summary(self) -> str:
        """The plan, the newest commit and the amount of work that can be lost now, in words; what is missing, if no
        commits come; empty before the first generation."""
        ...

    def check_commits(self) -> list[HubEvent]:
        """Called several times a second: gives up a checkpoint that is not uploaded in time, and returns what is to be
        said about commits that do not come, or come again."""
        ...

    @property
    def audit_summary(self) -> str:
        """What the hub has found when it computed reported losses again, in words; empty before the first time."""
        ...

    @property
    def alarms(self) -> int:
        """Number of losses, commits and boundary figures that the hub disputes since its start."""
        ...

    def pop_notices(self) -> list[str]:
        """Messages for the hub's owner; each is returned once."""
        ...

    def compare_hashes(self, hashes: Mapping[str, str]) -> str:
        """Compares a peer's hashes with the hub's. Returns the first difference in words; empty if there is none."""
        ...

    def find(self, name: str) -> Path | FileRange | None:
        """The file, or the part of one, that peers may fetch under this name; None if there is none."""
        ...

    def on_checkpoint_announced(
        self, peer: str, announced: CheckpointAnnouncement, public_key: str
    ) -> AnnouncementReply:
        """A peer has saved its part of a checkpoint, and has signed it with this key. Announcements of any generation
        but the newest are refused."""
        ...

    def own_files(self, peer: str, announced: CheckpointAnnouncement) -> list[SignedFile]:
        """Those of the announced files that this peer holds, each name once: the others count for nothing."""
        ...

    def refuse_announcement(self, peer: str, generation: int, reason: str) -> AnnouncementReply:
        """Refuses an announcement, and says so to the hub's owner."""
        ...

    def drop_peer(self, peer: str) -> None:
        """The peer was lost, has left or was restarted: its pending uploads will not finish."""
        ...

    def accept(self, peer: str, name: str) -> ExpectedFile | None:
        """Where to store this file, if the peer may upload it now; None: refused. Called for every chunk."""
        ...

    def on_file_saved(self, peer: str, name: str) -> None:
        """This peer's file is complete at the hub. Called again if the peer asks again."""
        ...

    def on_save_failed(self, peer: str, name: str, why: str) -> None:
        """The hub could not write this peer's file."""
        ...

    def tokens(self, split: str, index: int) -> bytes:
        """Token ids of one batch, as bytes; see `messages.TokensRequest`. Raises IndexError if there is no such
        batch."""
        ...

    def on_event(self, event: AnyEvent) -> None: ...

    def stop(self, reason: str) -> None:
        """The run cannot go on: "not_finite", or a reason in words."""
        ...

    @property
    def committed(self) -> int:
        """Step of the newest commit; 0: none yet."""
        ...

    @property
    def resume_step(self) -> int:
        """Step from which the next generation is expected to continue: of the checkpoint that peers are uploading, else
        of the newest commit."""
        ...

    @property
    def finished(self) -> bool:
        """True if the last step of the run is committed."""
        ...

    @property
    def ended(self) -> str:
        """Why the run has ended, in words; empty while it goes on."""
        ...

    @property
    def progress(self) -> Mapping[str, float]:
        """Numbers for `thinpipe status`: step, steps, loss, tokens_per_second; empty before the first step."""
        ...
