"""What peers ask the hub and what it answers, beside files and the store. Only these fields, of these types."""

from math import isfinite
from typing import Annotated, Literal

import msgspec

from thinpipe.core.numerics import Numerics
from thinpipe.swarm.reports import Above0, MachineReport

MOST_WORDS = 500
"""Characters of a text that peers send for people."""
_Short = Annotated[str, msgspec.Meta(max_length=200)]
_Words = Annotated[str, msgspec.Meta(max_length=MOST_WORDS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Anything else than exactly these fields gets no answer."""


class JoinRequest(Message, frozen=True, kw_only=True):
    """With the key of an invite."""

    public_key: _Short
    name: _Short = ""
    """That the newcomer would like to have; empty: the hub gives one."""
    numerics: Numerics
    """What it computes by: compared before the invite is used up."""
    heard: bool = False
    """The newcomer knows the name that it was told, which is here, and comes in now."""


class JoinAnswer(Message, frozen=True, kw_only=True):
    name: str = ""
    refusal: str = ""


class Accusation(Message, frozen=True, kw_only=True):
    """This peer of the same epoch has sent bad values twice in this step."""

    name: _Short
    step: _Count
    what: _Words
    """Was bad."""


class NextRequest(Message, frozen=True, kw_only=True):
    """What shall I do? The hub answers when it knows, or after a while that it does not."""

    life: _Short
    """Another one whenever the program was started: what an earlier one has sent is not believed."""
    numerics: Numerics
    """What it computes by: who comes back may have another thinpipe than when it joined."""
    report: MachineReport | None = None
    """None: the machine is not measured yet."""
    took_part_in: _Count = 0
    """The epoch that this peer has just left; 0: none."""
    why: _Words = ""
    """It left, if something went wrong."""
    accuses: Accusation | None = None
    together_bps: tuple[Above0, Above0] | None = None
    """Up and down, measured while all others measured too."""
    gave: _Short = ""
    """The manifest's sha256 of the checkpoint of which this peer has given the hub all that it has."""

    def __post_init__(self) -> None:
        if not all(map(isfinite, self.together_bps or ())):
            raise ValueError("rates must be finite")


class LeaveRequest(Message, frozen=True, kw_only=True):
    life: _Short
    """Of the program that ends: another one of the same peer stays."""


class Wait(Message, frozen=True, kw_only=True, tag="wait"):
    text: str
    """For the person who sits there."""
    manifest: bytes = b""
    """Of the newest checkpoint, for who has time to copy it; empty while nobody computes."""


class Measure(Message, frozen=True, kw_only=True, tag="measure"):
    """Your machine and line, alone; or your line, now that all do so at once: it shows what the hub's line can do."""

    together: bool
    settings: str = ""
    """Of the run, as TOML: what the machine is to be good at."""
    dim: int = 0
    """Of the model."""


class Work(Message, frozen=True, kw_only=True, tag="work"):
    """An epoch begins: who computes what, from where on."""

    epoch: int
    names: list[str]
    """In the order of the pipeline."""
    shares: list[int]
    """Segments of each."""
    lives: dict[str, int]
    """A number for the life that each is in."""
    settings: str
    """Of the run, as TOML."""
    manifest: bytes
    """Of the checkpoint to go on from."""
    facts: bytes
    """Of the data."""
    tokenizer: list[str]
    """Files to fetch."""
    removed_for: list[int] = []
    """Steps for which somebody was removed: what is bad there or near it again is so by itself, and is skipped."""
    text: str
    """For the person who sits there."""
    keep_bytes_per_second: dict[str, float] = {}
    """How fast each may send what it saves while training goes on; empty: as fast as it can."""


class Give(Message, frozen=True, kw_only=True, tag="give"):
    """The hub has lost files of its newest checkpoint: send those that you have, then ask again."""

    step: int
    files: dict[str, str]
    """Names, with the sha256 that each must have."""
    manifest: str
    """Its sha256, to be told when all is given."""
    text: str
    """For the person who sits there."""


class Done(Message, frozen=True, kw_only=True, tag="done"):
    text: str
    again: bool = False
    """The run has not ended: the hub's owner has stopped it and may start it again."""


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """There is no use in asking again."""

    text: str


Answer = Wait | Measure | Work | Give | Done | Refused


class Ready(Message, frozen=True, kw_only=True):
    """What this peer has, to be compared with what the hub has."""

    epoch: _Count
    hashes: Annotated[dict[_Short, _Short], msgspec.Meta(max_length=20)]


class Verdict(Message, frozen=True, kw_only=True):
    refusal: str = ""
    later: bool = False
    """Not now: ask again in a moment."""
    over: bool = False
    """The epoch is over: ask what to do next."""
    committed: int = 0
    """The newest step that the hub has whole."""


class TokensRequest(Message, frozen=True, kw_only=True):
    split: Literal["train", "validation"]
    index: _Count
    """Samples seen before the batch, or the number of the validation batch."""


class SavedRequest(Message, frozen=True, kw_only=True):
    """This peer has its part of a checkpoint, which is these files, and will send them."""

    epoch: _Count
    manifest: bytes
    files: list[str]


class EventTold(Message, frozen=True, kw_only=True):
    """The first peer of an epoch tells what happens in it; there is no answer."""

    epoch: _Count
    event: bytes
    """As JSON."""


class AdminRequest(Message, frozen=True, kw_only=True):
    """From who owns the hub's folder."""

    what: Literal["kick", "invite", "stop"]
    name: str = ""


class AdminAnswer(Message, frozen=True, kw_only=True):
    text: str = ""
    refusal: str = ""
