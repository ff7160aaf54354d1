"""Requests of peers to the hub and the hub's replies, except those of the file, store and reduction services.

Every message is a msgspec struct whose fields and types are checked while it is decoded; unknown fields are rejected.
"""

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec

from thinpipe.core.bounds import (
    MAX_FILES,
    MAX_SEGMENTS,
    BitRate,
    ByteRate,
    Clock,
    Count,
    GenerationNumber,
    Jwt,
    LayerFileName,
    LongText,
    Name,
    Sha256,
    Text,
    TokenizerFile,
    Toml,
    Word,
)
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.protocol.machine_report import MachineReport
from thinpipe.swarm.protocol.signed_files import FullSha256, SignedFile

MAX_UPLOAD_SECONDS = 1800.0
"""Seconds that a peer may take to upload its part of a checkpoint; the next generation waits no longer."""
EXIT_TEMPFAIL = 75
"""Exit code of `thinpipe join` when the hub's owner has stopped the hub and may start it again: EX_TEMPFAIL of
sysexits.h, after which a service manager restarts the process."""
MAX_TEXT_CHARACTERS = 500
"""Maximum length, in characters, of a text that a peer sends for people to read."""
MAX_PEERS = 4096
"""Maximum number of peers in a generation."""
MAX_EVENT_NBYTES = 256 << 10
"""Maximum size of an event, in bytes."""
MAX_LINES = 1000
"""Maximum number of lines in an answer to the hub's owner."""
_Heads = Annotated[int, msgspec.Meta(ge=1, le=4096)]
_Files = Annotated[list[LayerFileName], msgspec.Meta(max_length=MAX_FILES)]
_PeerName = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{1,32}\Z")]
_Peers = msgspec.Meta(min_length=1, max_length=MAX_PEERS)
_Json = Annotated[bytes, msgspec.Meta(max_length=4 << 20)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of all messages. To data with missing, unknown or wrongly typed fields the hub does not reply, except
    that it refuses a `NextRequest` of another version of the protocol."""


class JoinRequest(Message, frozen=True, kw_only=True):
    """Request to become a peer, sent with the key of an invite. Asked again with the same key, it has the same
    answer."""

    public_key: Word
    """The newcomer's own public key, whose seed is on its disk already."""
    name: Text = ""
    """Peer name that the newcomer asks for; empty: the hub chooses one."""
    numerics: Numerics
    """Numerics and torch version of the newcomer, compared with the hub's before the invite is used up."""


class JoinAnswer(Message, frozen=True, kw_only=True):
    """The newcomer's name and JWTs, or the reason why it is refused."""

    name: Name = ""
    jwt: Jwt = ""
    """Lets the newcomer's key sign in as this peer."""
    renewal: Jwt = ""
    """Lets the newcomer's key ask for a new `jwt`; never expires."""
    refusal: LongText = ""
    time_s: Clock = 0.0
    """Hub's clock, in seconds since 1970."""


class InviteCheck(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Question of an invite's holder whether the invite could be used now; does not use it up."""

    what: Literal["check"] = "check"
    numerics: Numerics | None = None
    """Asks whether a machine with these could take part, in place of the invite's state. None: not asked."""


class InviteState(Message, frozen=True, kw_only=True):
    """Reply to `InviteCheck`."""

    refusal: LongText = ""
    """Why the invite cannot be used; empty: it can."""
    expires_s: Clock
    """When the invite ends, in seconds since 1970."""
    time_s: Clock
    """Hub's clock, in seconds since 1970."""
    who_reads: LongText = ""
    """Who can read the data of the run, in one sentence."""


class ReachRequest(Message, frozen=True, kw_only=True):
    """A peer has tried the hub's address from its own machine."""

    address: Word
    """Host and port that were tried: those of the invite, as far as the peer knows them."""
    outcome: Literal["reached", "unreachable", "another_certificate"] = "reached"
    error: Text = ""
    """Why the address is unreachable."""


class ReachReply(Message, frozen=True, kw_only=True):
    """Reply to `ReachRequest`."""

    text: LongText = ""
    """What the attempt shows, for the peer's user; empty: nothing."""


class RenewReply(Message, frozen=True, kw_only=True):
    """Reply to a peer that asks for a new JWT for its key."""

    jwt: Jwt
    time_s: Clock
    """Hub's clock, in seconds since 1970."""


class Accusation(Message, frozen=True, kw_only=True):
    """Report that a peer of the same generation has sent bad values twice in one step."""

    name: Name
    """Name of the accused peer."""
    step: Count
    what: Text
    """Description of the bad values."""


NEAR_STEPS = 3
"""Two steps fewer than this apart count as the same numerical failure. Diverged weights stay diverged from step to
step, also across a change of generation, and other hardware may reach the failure a little sooner or later."""


def is_near(step: int, others: Collection[int]) -> bool:
    """True if a step is one of these or close to one (see `NEAR_STEPS`)."""
    return any(abs(step - each) < NEAR_STEPS for each in others)


class NextRequest(Message, frozen=True, kw_only=True):
    """A peer asks the hub what to do next. Long poll: the hub replies as soon as it knows, or with `Standby` after a
    while."""

    incarnation: Word
    """Incarnation id of the peer process, new at every start. Requests of a superseded incarnation are refused."""
    numerics: Numerics
    """Numerics and torch version of the peer, which may have changed since it joined."""
    report: MachineReport | None = None
    """Measured speed and memory of the machine; None: not measured yet."""
    left_generation: GenerationNumber = 0
    """Number of the generation that this peer has just left; 0: none."""
    error: Text = ""
    """Error that made the peer leave the generation; empty if there was none."""
    stop_reason: Literal["", "finished", "signal", "not_finite", "not_saved"] = ""
    """Reason with which training stopped in the generation that this peer has just left (see `core.events.Stopped`);
    empty if training did not stop in order."""
    accusation: Accusation | None = None
    """Peer that this peer holds responsible for the end of the generation, if any."""
    concurrent_bps: tuple[BitRate, BitRate] | None = None
    """Uplink and downlink rates in bits per second, measured while all other peers measured too."""
    uploaded: Sha256 = ""
    """sha256 of the manifest of the checkpoint whose files this peer has finished restoring to the hub (see
    `RestoreFiles`)."""


class LeaveRequest(Message, frozen=True, kw_only=True):
    """The peer process ends; the hub need not wait for missing heartbeats."""

    incarnation: Word
    """Incarnation id of the process that ends. Ignored unless it is the peer's current incarnation."""
    after_saving: bool = False
    """True: the process takes part until its generation has stopped and saved, and then ends. The hub learns from this
    announcement which peer ends the generation."""


class LeaveReply(Message, frozen=True, kw_only=True):
    """Confirmation of a `LeaveRequest`."""


class Standby(Message, frozen=True, kw_only=True, tag="standby"):
    """The peer has nothing to compute: it asks again, and meanwhile may mirror the newest checkpoint."""

    text: LongText
    """Explanation for the peer's user."""
    manifest: _Json = b""
    """Manifest (JSON) of the newest committed checkpoint, to be mirrored; empty while no generation is running."""


class Measure(Message, frozen=True, kw_only=True, tag="measure"):
    """The peer is to measure its machine and its link; or, if `concurrent`, its link only, while all peers measure at
    once, which shows the capacity of the hub's link."""

    concurrent: bool
    """True: measure the link at the same time as all other peers."""
    settings: Toml = ""
    """Settings of the run as TOML; they determine the shapes and number formats to benchmark."""
    dim: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """Hidden dimension of the model."""
    heads: tuple[_Heads, _Heads, _Heads] = (1, 1, 1)
    """Number of query heads and of key heads in a block, and the width of a head."""


class Assignment(Message, frozen=True, kw_only=True, tag="assignment"):
    """A generation begins: its peers, their pipeline stages and the checkpoint to resume from."""

    generation: GenerationNumber
    names: Annotated[list[_PeerName], _Peers]
    """Peer names in pipeline order."""
    shares: Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=MAX_SEGMENTS)]], _Peers]
    """Number of model segments of each peer, in pipeline order."""
    incarnations: Annotated[dict[_PeerName, GenerationNumber], _Peers]
    """Incarnation number of each peer, by name."""
    settings: Toml
    """Settings of the run as TOML."""
    manifest: _Json
    """Manifest (JSON) of the checkpoint to resume from."""
    dataset_info: _Json
    """`DatasetInfo` of the run's data, as JSON."""
    tokenizer: Annotated[list[TokenizerFile], msgspec.Meta(max_length=MAX_FILES)]
    """Names of the tokenizer files to fetch from the hub."""
    diverged_steps: Annotated[list[Count], msgspec.Meta(max_length=10_000)] = []
    """Steps at which no single peer can have caused the bad values. At or near such a step the cause is the run itself:
    the step is skipped and no peer is accused."""
    text: LongText
    """Explanation for the peer's user."""
    upload_bytes_per_second: Annotated[dict[_PeerName, ByteRate], msgspec.Meta(max_length=MAX_PEERS)] = {}
    """Upload rate limit for checkpoints during training, in bytes per second by peer name; empty: unlimited."""

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names) or len(self.shares) != len(self.names):
            raise ValueError("peers that are named twice, or without a share")
        if self.incarnations.keys() != set(self.names):
            raise ValueError("incarnations of other peers")


class RestoreFiles(Message, frozen=True, kw_only=True, tag="restore_files"):
    """The hub has lost files of its newest checkpoint: the peer uploads the ones that it has, then asks again."""

    step: Count
    """Step of the checkpoint."""
    files: Annotated[dict[LayerFileName, Sha256], msgspec.Meta(max_length=MAX_FILES)]
    """sha256 of each lost file, by file name."""
    manifest: Sha256
    """sha256 of the checkpoint's manifest, which the peer returns in `NextRequest.uploaded` when its uploads are
    done."""
    text: LongText
    """Explanation for the peer's user."""


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    """The hub shuts down: the peer process ends."""

    text: LongText
    will_resume: bool = False
    """True: the run is not complete; the hub's owner has stopped the hub and may start it again."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The peer cannot take part and must not ask again. Peers of all versions read this message: its tag and its fields
    do not change."""

    text: LongText


Answer = Standby | Measure | Assignment | RestoreFiles | Finished | Refused


class Note(Message, frozen=True, kw_only=True):
    """Sent by the hub to a peer whose key it is about to remove. Of another sender it is ignored."""

    text: LongText
    """Why the peer is removed, for its user."""


class ReadyRequest(Message, frozen=True, kw_only=True):
    """Hashes of what a peer has loaded for a generation, which the hub compares with its own before training starts."""

    generation: GenerationNumber
    hashes: Annotated[dict[Word, Word], msgspec.Meta(max_length=20)]
    """Hashes by field name: settings, tokenizer, and the model's basis and fixed tables."""


class ReadyReply(Message, frozen=True, kw_only=True):
    """Reply to `ReadyRequest`."""

    refusal: LongText = ""
    """Reason of a refusal; empty: accepted."""
    generation_over: bool = False
    """True: the generation is over; the peer asks with `NextRequest` what to do."""


class TokensRequest(Message, frozen=True, kw_only=True):
    """Request for the token ids of one global batch."""

    split: Literal["train", "validation"]
    index: Count
    """For `train`: number of samples before the batch. For `validation`: index of the batch."""


class CheckpointAnnouncement(Message, frozen=True, kw_only=True):
    """A peer has saved its part of a checkpoint and asks which of its files to upload."""

    generation: GenerationNumber
    step: Count
    samples_seen: Count
    """Data cursor: see `checkpoint.Manifest`."""
    basis_version: Count | None
    basis_sha256: FullSha256 | None
    files: Annotated[list[SignedFile], msgspec.Meta(max_length=MAX_FILES)]
    """The files of this peer's layers, and no others."""


class AnnouncementReply(Message, frozen=True, kw_only=True):
    """Reply to `CheckpointAnnouncement`."""

    refusal: LongText = ""
    """Reason of a refusal; empty: accepted."""
    retry_later: bool = False
    """True: not all peers have announced this checkpoint, or the hub still receives an older one; announce again in a
    moment."""
    wanted: _Files = []
    """Names of the files to upload now."""
    committed: Count = 0
    """Step of the newest commit; 0: none yet."""


class EventReport(Message, frozen=True, kw_only=True):
    """Training event of a generation, sent by its first peer. The hub does not reply."""

    generation: GenerationNumber
    event: Annotated[bytes, msgspec.Meta(max_length=MAX_EVENT_NBYTES)]
    """Event as JSON."""


class AdminRequest(Message, frozen=True, kw_only=True):
    """Command of the owner of the hub's folder, sent with the hub's own key."""

    what: Literal["kick", "invite", "list", "revoke", "stop"]
    """`list` and `revoke`: of invites."""
    name: Text = ""
    """Peer to kick, or id of the invite to revoke; empty for other commands."""


class AdminAnswer(Message, frozen=True, kw_only=True):
    """Result of an `AdminRequest` in words, or the reason why it is refused."""

    text: LongText = ""
    lines: Annotated[list[Text], msgspec.Meta(max_length=MAX_LINES)] = []
    """What was asked for, if it is a list."""
    refusal: LongText = ""
