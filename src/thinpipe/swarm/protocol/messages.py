"""Requests of peers to the hub and the hub's replies, except those of the file, store and reduction services.

Every message is a msgspec struct whose fields and types are checked while it is decoded; unknown fields are rejected.
"""

from collections.abc import Collection
from math import isfinite
from typing import Annotated, Literal

import msgspec

from thinpipe.core.numerics import Numerics
from thinpipe.swarm.protocol.machine_report import MachineReport, PositiveFloat

MAX_UPLOAD_SECONDS = 1800.0
"""Seconds that a peer may take to upload its part of a checkpoint; the next generation waits no longer."""
EXIT_TEMPFAIL = 75
"""Exit code of `thinpipe join` when the hub's owner has stopped the hub and may start it again: EX_TEMPFAIL of
sysexits.h, after which a service manager restarts the process."""
MAX_TEXT_CHARACTERS = 500
"""Maximum length, in characters, of a text that a peer sends for people to read."""
_Short = Annotated[str, msgspec.Meta(max_length=200)]
_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARACTERS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Heads = Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all messages. To data with missing, unknown or wrongly typed fields the hub does not reply, except
    that it refuses a `NextRequest` of another version of the protocol."""


class JoinRequest(Message, frozen=True, kw_only=True):
    """Request to become a peer, sent with the key of an invite."""

    public_key: _Short
    """The newcomer's own public key, with which it connects once it is a peer."""
    name: _Short = ""
    """Peer name that the newcomer asks for; empty: the hub chooses one."""
    numerics: Numerics
    """Numerics and torch version of the newcomer, compared with the hub's before the invite is used up."""
    confirmed: bool = False
    """True in the second request: `name` is the name that the hub has offered, and the newcomer is to be admitted
    now."""


class JoinAnswer(Message, frozen=True, kw_only=True):
    """The name offered to a newcomer, or the reason why it is refused."""

    name: str = ""
    refusal: str = ""


class Accusation(Message, frozen=True, kw_only=True):
    """Report that a peer of the same generation has sent bad values twice in one step."""

    name: _Short
    """Name of the accused peer."""
    step: _Count
    what: _Text
    """Description of the bad values."""


NEAR_STEPS = 3
"""Two steps fewer than this apart count as the same numerical failure. Diverged weights stay diverged from step to
step, also across a change of generation, and other hardware may reach the failure a little sooner or later."""


def is_near_removal(step: int, removal_steps: Collection[int]) -> bool:
    """True if a peer has already been removed for this step or for a step close to it (see `NEAR_STEPS`)."""
    return any(abs(step - each) < NEAR_STEPS for each in removal_steps)


class NextRequest(Message, frozen=True, kw_only=True):
    """A peer asks the hub what to do next. Long poll: the hub replies as soon as it knows, or with `Standby` after a
    while."""

    incarnation: _Short
    """Incarnation id of the peer process, new at every start. Requests of a superseded incarnation are refused."""
    numerics: Numerics
    """Numerics and torch version of the peer, which may have changed since it joined."""
    report: MachineReport | None = None
    """Measured speed and memory of the machine; None: not measured yet."""
    left_generation: _Count = 0
    """Number of the generation that this peer has just left; 0: none."""
    error: _Text = ""
    """Error that made the peer leave the generation; empty if there was none."""
    stop_reason: Literal["", "finished", "signal", "not_finite", "not_saved"] = ""
    """Reason with which training stopped in the generation that this peer has just left (see `core.events.Stopped`);
    empty if training did not stop in order."""
    accusation: Accusation | None = None
    """Peer that this peer holds responsible for the end of the generation, if any."""
    concurrent_bps: tuple[PositiveFloat, PositiveFloat] | None = None
    """Uplink and downlink rates in bits per second, measured while all other peers measured too."""
    uploaded: _Short = ""
    """sha256 of the manifest of the checkpoint whose files this peer has finished restoring to the hub (see
    `RestoreFiles`)."""

    def __post_init__(self) -> None:
        if not all(map(isfinite, self.concurrent_bps or ())):
            raise ValueError("rates must be finite")


class LeaveRequest(Message, frozen=True, kw_only=True):
    """The peer process ends; the hub need not wait for missing heartbeats."""

    incarnation: _Short
    """Incarnation id of the process that ends. Ignored unless it is the peer's current incarnation."""
    after_saving: bool = False
    """True: the process takes part until its generation has stopped and saved, and then ends. The hub learns from this
    announcement which peer ends the generation."""


class LeaveReply(Message, frozen=True, kw_only=True):
    """Confirmation of a `LeaveRequest`."""


class Standby(Message, frozen=True, kw_only=True, tag="standby"):
    """The peer has nothing to compute: it asks again, and meanwhile may mirror the newest checkpoint."""

    text: str
    """Explanation for the peer's user."""
    manifest: bytes = b""
    """Manifest (JSON) of the newest committed checkpoint, to be mirrored; empty while no generation is running."""


class Measure(Message, frozen=True, kw_only=True, tag="measure"):
    """The peer is to measure its machine and its link; or, if `concurrent`, its link only, while all peers measure at
    once, which shows the capacity of the hub's link."""

    concurrent: bool
    """True: measure the link at the same time as all other peers."""
    settings: str = ""
    """Settings of the run as TOML; they determine the shapes and number formats to benchmark."""
    dim: int = 0
    """Hidden dimension of the model."""
    heads: tuple[_Heads, _Heads, _Heads] = (1, 1, 1)
    """Number of query heads and of key heads in a block, and the width of a head."""


class Assignment(Message, frozen=True, kw_only=True, tag="assignment"):
    """A generation begins: its peers, their pipeline stages and the checkpoint to resume from."""

    generation: int
    names: list[str]
    """Peer names in pipeline order."""
    shares: list[int]
    """Number of model segments of each peer, in pipeline order."""
    incarnations: dict[str, int]
    """Incarnation number of each peer, by name."""
    settings: str
    """Settings of the run as TOML."""
    manifest: bytes
    """Manifest (JSON) of the checkpoint to resume from."""
    dataset_info: bytes
    """`DatasetInfo` of the run's data, as JSON."""
    tokenizer: list[str]
    """Names of the tokenizer files to fetch from the hub."""
    removal_steps: list[int] = []
    """Steps for which a peer was removed. Bad values at or near such a step are taken to be the run's own divergence:
    the step is skipped and no peer is accused."""
    text: str
    """Explanation for the peer's user."""
    upload_bytes_per_second: dict[str, float] = {}
    """Upload rate limit for checkpoints during training, in bytes per second by peer name; empty: unlimited."""


class RestoreFiles(Message, frozen=True, kw_only=True, tag="restore_files"):
    """The hub has lost files of its newest checkpoint: the peer uploads the ones that it has, then asks again."""

    step: int
    """Step of the checkpoint."""
    files: dict[str, str]
    """sha256 of each lost file, by file name."""
    manifest: str
    """sha256 of the checkpoint's manifest, which the peer returns in `NextRequest.uploaded` when its uploads are
    done."""
    text: str
    """Explanation for the peer's user."""


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The hub shuts down: the peer process ends."""

    text: str
    will_resume: bool = False
    """True: the run is not complete; the hub's owner has stopped the hub and may start it again."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The peer cannot take part and must not ask again. Peers of all versions read this message: its tag and its fields
    do not change."""

    text: str


Answer = Standby | Measure | Assignment | RestoreFiles | Finished | Refused


class ReadyRequest(Message, frozen=True, kw_only=True):
    """Hashes of what a peer has loaded for a generation, which the hub compares with its own before training starts."""

    generation: _Count
    hashes: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=20)]
    """Hashes by field name: settings, tokenizer, and the model's basis and fixed tables."""


class ReadyReply(Message, frozen=True, kw_only=True):
    """Reply to `ReadyRequest`."""

    refusal: str = ""
    """Reason of a refusal; empty: accepted."""
    generation_over: bool = False
    """True: the generation is over; the peer asks with `NextRequest` what to do."""


class TokensRequest(Message, frozen=True, kw_only=True):
    """Request for the token ids of one global batch."""

    split: Literal["train", "validation"]
    index: _Count
    """For `train`: number of samples before the batch. For `validation`: index of the batch."""


class CheckpointAnnouncement(Message, frozen=True, kw_only=True):
    """A peer has saved its part of a checkpoint and will upload these files."""

    generation: _Count
    manifest: bytes
    """Manifest of the whole checkpoint, as JSON; the same at all peers."""
    files: list[str]
    """Names of the files that this peer uploads."""


class AnnouncementReply(Message, frozen=True, kw_only=True):
    """Reply to `CheckpointAnnouncement`."""

    refusal: str = ""
    """Reason of a refusal; empty: accepted."""
    retry_later: bool = False
    """True: the hub still receives an older checkpoint; announce again in a moment."""
    committed: int = 0
    """Step of the newest commit; 0: none yet."""


class EventReport(Message, frozen=True, kw_only=True):
    """Training event of a generation, sent by its first peer. The hub does not reply."""

    generation: _Count
    event: bytes
    """Event as JSON."""


class AdminRequest(Message, frozen=True, kw_only=True):
    """Command of the owner of the hub's folder, sent with the hub's own key."""

    what: Literal["kick", "invite", "stop"]
    name: str = ""
    """Peer to kick; empty for other commands."""


class AdminAnswer(Message, frozen=True, kw_only=True):
    """Result of an `AdminRequest` in words, or the reason why it is refused."""

    text: str = ""
    refusal: str = ""
