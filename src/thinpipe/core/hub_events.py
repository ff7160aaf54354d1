"""Events that only a hub writes: generations, membership, commits; part of the schema in `core.events`."""

import msgspec

from thinpipe.core.audit_events import CommitMeasured, LayersUnchanged, LossRecomputed
from thinpipe.core.event_base import Event


class PeerAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Segments assigned to a peer, and the measured speed of its machine and of its link to the hub."""

    name: str
    segments: list[int]
    device: str = ""
    device_class: str = ""
    """What must be alike for equal bits (`device.device_class`); empty: the device does not repeat its own bits."""
    flops: float = 0.0
    """Measured floating-point operations per second."""
    memory_nbytes: int = 0
    """Memory of the peer that the run may use, in bytes."""
    up_bps: float = 0.0
    """Uplink rate in bits per second."""
    down_bps: float = 0.0
    """Downlink rate in bits per second."""
    latency_s: float = 0.0
    """Round-trip time to the hub in seconds."""


class GenerationStarted(Event, frozen=True, kw_only=True, tag="generation_started"):
    """A generation of a hub's run started: the set of peers that compute together until `GenerationEnded`. Peers that
    are not listed are standbys."""

    generation: int
    step: int
    """Step of the commit from which the generation continues."""
    peers: list[PeerAssignment]
    """Peers in pipeline order."""
    bottleneck: str = ""
    """Slowest part of the pipeline according to the measurements, in words."""
    planned_tokens_per_second: float = 0.0
    """Speed of that slowest part; 0: unknown."""
    who_reads: str = ""
    """Who can read the data, in one sentence; empty in the logs of older hubs."""


RUN_ENDING_CAUSES = ("finished", "not_finite", "stopped")
"""Causes of `GenerationEnded` after which the hub forms no further generation."""


class GenerationEnded(Event, frozen=True, kw_only=True, tag="generation_ended"):
    """A generation of a hub's run ended: its peers stop computing, and the hub forms the next generation."""

    generation: int
    step: int
    """Step from which the next generation is expected to continue: of the checkpoint that the peers are uploading, else
    of the newest commit. `GenerationStarted.step` is the step from which it does."""
    cause: str
    """A cause of `PeerLeft`, if a peer of the generation left; otherwise failed (a peer reported an error), deadlock,
    rebalance (standbys can take part), not_saved, not_finite, stopped (while the hub's owner stopped the run, whatever
    the reason) or finished. With cause accused the sums of the steps show bad values, and `reason` names all who may be
    at fault: a `PeerSuspended`, or a `PeerLeft` with cause accused, says what follows."""
    peer: str = ""
    """Peer that caused the end; empty if no single peer did."""
    reason: str
    """Cause in words, with the name of the peer."""

    @property
    def interrupts(self) -> bool:
        """False if the run ends with the generation: it is finished, has diverged or was stopped by the hub's owner."""
        return self.cause not in RUN_ENDING_CAUSES


class PeerJoined(Event, frozen=True, kw_only=True, tag="peer_joined"):
    """A peer joined or rejoined a hub's run."""

    step: int
    """Step of the newest commit."""
    peer: str


class PeerLeft(Event, frozen=True, kw_only=True, tag="peer_left"):
    """A peer left a hub's run, was lost, or was removed."""

    step: int
    """Step of the newest commit."""
    peer: str
    cause: str
    """One of left, restarted, disconnected, no_heartbeat, stalled, unresponsive (heartbeats arrive, but no request),
    refused (other settings or data), accused (by other peers, of sending bad values) and kicked (by the hub's
    owner)."""
    reason: str
    """Cause in words, with the name of the peer."""


class PeerSuspended(Event, frozen=True, kw_only=True, tag="peer_suspended"):
    """A peer of a hub's run takes no part in generations for a while. It stays a member."""

    step: int
    """Step of the newest commit."""
    peer: str
    by: str = ""
    """The peer whose word it is; empty: the hub has seen the cause itself, or the word of several peers."""
    seconds: float
    reason: str
    """Cause in words, with the names of all peers that may be at fault."""


class PeerResumed(Event, frozen=True, kw_only=True, tag="peer_resumed"):
    """The suspension of a peer is over."""

    step: int
    """Step of the newest commit."""
    peer: str
    reason: str


class CheckpointDamaged(Event, frozen=True, kw_only=True, tag="checkpoint_damaged"):
    """Files of the hub's newest commit are missing or damaged, and the hub asks the peers for copies."""

    step: int
    """Step of the commit."""
    layers: list[str]
    """Layers whose files are missing or damaged."""
    reason: str
    """The layers and the peers that hold copies, in words."""


class CheckpointRepaired(Event, frozen=True, kw_only=True, tag="checkpoint_repaired"):
    """The hub has all files of its newest commit again."""

    step: int


class RolledBack(Event, frozen=True, kw_only=True, tag="rolled_back"):
    """No present peer has the missing files of the newest commit: the run continues from an older commit."""

    step: int
    """Step of the older commit."""
    lost_step: int
    """Step of the commit that was given up."""
    reason: str
    """The missing layers and the peers that hold copies, in words."""
    folder: str
    """Folder with the remaining files of the commit that was given up."""


class FilesRefused(Event, frozen=True, kw_only=True, tag="files_refused"):
    """The hub has not accepted what a peer announced of a checkpoint, in whole or in part."""

    step: int
    """Step of the newest commit."""
    peer: str
    reason: str
    """What was refused and why, in words, with the name of the peer."""


class CheckpointAbandoned(Event, frozen=True, kw_only=True, tag="checkpoint_abandoned"):
    """The hub has given up a checkpoint, because a peer that had announced its files did not upload them in time."""

    step: int
    """Step of the newest commit."""
    reason: str
    """Who owes which files of which step, in words."""


class CommitsOverdue(Event, frozen=True, kw_only=True, tag="commits_overdue"):
    """Training has gone on for several times the planned interval without a commit."""

    step: int
    """Step of the newest commit."""
    seconds: float
    """Seconds of training since then."""
    reason: str
    """Who owes what, in words."""


class CommitsResumed(Event, frozen=True, kw_only=True, tag="commits_resumed"):
    """There is a commit again, after `CommitsOverdue`."""

    step: int
    """Its step."""


class ExactnessLost(Event, frozen=True, kw_only=True, tag="exactness_lost"):
    """From this step on the numbers are no longer promised to be those of an undisturbed run; see `core.exactness`."""

    step: int
    reason: str


HubEvent = (
    GenerationStarted
    | GenerationEnded
    | PeerJoined
    | PeerLeft
    | PeerSuspended
    | PeerResumed
    | CheckpointDamaged
    | CheckpointRepaired
    | RolledBack
    | FilesRefused
    | CheckpointAbandoned
    | CommitsOverdue
    | CommitsResumed
    | ExactnessLost
    | LossRecomputed
    | CommitMeasured
    | LayersUnchanged
)
"""Events that only a hub writes; the hub rejects them from peers."""
