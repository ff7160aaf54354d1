"""The attacks of a chaos run as a table: what is sent, which rule of the run is to answer it, and whether the attacker
must be named. Pure, and without torch. `requests`, `floods` and `training` say how each is carried out.

A new attack is its name, an entry here and a function there.
"""

import re
from dataclasses import dataclass
from typing import Literal, get_args

AttackName = Literal[
    "headers_member",
    "headers_invite",
    "headers_peer",
    "words_of_hub",
    "malformed_messages",
    "malformed_frames",
    "altered_frames",
    "old_incarnation",
    "absurd_report",
    "absurd_event",
    "admin_requests",
    "false_accusation",
    "end_of_run",
    "leaving_again",
    "others_files",
    "phantom_checkpoint",
    "spoilt_rendezvous",
    "nan_in_sum",
    "stall",
    "flood_store",
    "flood_heartbeats",
    "flood_payloads",
    "flood_neighbour",
]
ATTACK_NAMES: tuple[AttackName, ...] = get_args(AttackName)
ATTACKER = "mallory"
"""What the names of the hostile member begin with: it gets a new one with every new invite."""


_NAMED = re.compile(rf"\b{ATTACKER}\d*\b")


def is_attacker(name: str) -> bool:
    return name.startswith(ATTACKER)


def names_attacker(text: str) -> bool:
    return _NAMED.search(text) is not None


@dataclass(frozen=True, kw_only=True)
class Attack:
    sends: str
    answer: str
    """The rule that is to answer it."""
    named: bool
    """The hub must name the attacker, in an event or in its own log. Otherwise the attack is to have no effect, and
    nobody need hear of it."""
    computes: bool = False
    """Only who has a part of the model can do it."""
    seconds: float = 0.0
    """How long it lasts."""


ATTACKS: dict[AttackName, Attack] = {
    "headers_member": Attack(
        sends="messages to the hub with headers that cannot be read",
        answer="a message that cannot be read is dropped, and its connection goes on",
        named=False,
    ),
    "headers_invite": Attack(
        sends="the same, with the key of an invite that nobody has used",
        answer="a message that cannot be read is dropped, and its connection goes on",
        named=False,
    ),
    "headers_peer": Attack(
        sends="the same, to every peer",
        answer="a message that cannot be read is dropped, and its connection goes on",
        named=False,
    ),
    "words_of_hub": Attack(
        sends="to every peer that the hub's owner has removed it; broadcasts in the name of the hub",
        answer="what the hub says is taken from the hub alone",
        named=False,
    ),
    "malformed_messages": Attack(
        sends="to every service of the hub: noise, and messages with missing ends, wrong types and extreme numbers",
        answer="every message passes one validated decoding",
        named=False,
    ),
    "malformed_frames": Attack(
        sends="noise in place of a message of the pipeline, as one who computes",
        answer="a frame that cannot be read ends the generation and names the sender",
        named=True,
        computes=True,
    ),
    "altered_frames": Attack(
        sends="a message of the pipeline with one bit changed, as one who computes",
        answer="a frame with a wrong checksum ends the generation and names the sender",
        named=True,
        computes=True,
    ),
    "old_incarnation": Attack(
        sends="after a new start: frames, requests and heartbeats of the start before",
        answer="messages of an earlier incarnation are ignored",
        named=False,
        computes=True,
    ),
    "absurd_report": Attack(
        sends="a machine with 1e308 FLOP/s, a link of 1e-30 bits per second and a latency of 1e308 s",
        answer="numbers of a machine have bounds, and beginning a generation is all or nothing",
        named=False,
        computes=True,
        seconds=10.0,
    ),
    "absurd_event": Attack(
        sends="as the first peer: steps of 1e308 seconds, of 2^53 and with extreme losses",
        answer="numbers of an event have bounds, and the step must be one that this generation computes",
        named=False,
        computes=True,
    ),
    "admin_requests": Attack(
        sends="commands of the owner: stop, kick, invite; malformed ones too",
        answer="commands are taken from the hub's own key alone",
        named=False,
    ),
    "false_accusation": Attack(
        sends="that each of the others in turn has sent bad values",
        answer="nobody is removed at the word of one",
        named=True,
        computes=True,
    ),
    "end_of_run": Attack(
        sends="that the run has stopped because it is not finite, as an event and as the reason to leave",
        answer="the end of the run needs more than the word of one",
        named=True,
        computes=True,
    ),
    "leaving_again": Attack(
        sends="that it has left, in each of five generations as soon as it has begun",
        answer="who ends generation after generation is named, and gets no further place",
        named=True,
        computes=True,
        seconds=20.0,
    ),
    "others_files": Attack(
        sends="a checkpoint with a file of its own making in place of another peer's",
        answer="a layer's file is accepted from who computes the layer",
        named=True,
        computes=True,
        seconds=15.0,
    ),
    "phantom_checkpoint": Attack(
        sends="a checkpoint of a step that nobody has computed",
        answer="who does not send what it has announced delays no commit, and is named",
        named=True,
        computes=True,
    ),
    "spoilt_rendezvous": Attack(
        sends="deletes the keys through which the others find each other, and fills the store",
        answer="a key of the store belongs to who has set it",
        named=False,
        computes=True,
        seconds=5.0,
    ),
    "nan_in_sum": Attack(
        sends="NaN as its share of the sum of a step, twice",
        answer="the hub names whose numbers are not finite, and the step is computed again without them",
        named=True,
        computes=True,
    ),
    "stall": Attack(
        sends="heartbeats, and nothing else: it computes nothing for half a minute",
        answer="who makes no progress within its deadline is lost",
        named=True,
        computes=True,
        seconds=30.0,
    ),
    "flood_store": Attack(
        sends="2 MB requests to the store as fast as it can",
        answer="bytes and messages have budgets for each peer and service, and who exceeds them is named",
        named=True,
        computes=True,
        seconds=8.0,
    ),
    "flood_heartbeats": Attack(
        sends="heartbeats as fast as it can",
        answer="bytes and messages have budgets for each peer and service, and who exceeds them is named",
        named=True,
        seconds=8.0,
    ),
    "flood_payloads": Attack(
        sends="the largest messages that the server takes of a peer, to a service that needs none",
        answer="bytes and messages have budgets for each peer and service, and who exceeds them is named",
        named=True,
        seconds=8.0,
    ),
    "flood_neighbour": Attack(
        sends="1 MB messages to the mailbox of another peer, as fast as it can",
        answer="a peer receives from its own generation alone, and the server drops the rest",
        named=False,
        seconds=8.0,
    ),
}
assert tuple(ATTACKS) == ATTACK_NAMES
