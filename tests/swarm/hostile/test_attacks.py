"""What a member tried against a run, and what comes of it: the hub and the honest peers go on."""

import msgspec
import pytest

from tests.swarm.hostile.adversary import MALFORMED_HEADERS, Adversary, Stranger
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.status import Status

SECONDS = 20
"""Longer than a hub that lives needs for an answer."""


def status_of(member):
    return msgspec.msgpack.decode(member.ask("status", b"", SECONDS), type=Status)


@pytest.mark.parametrize("header", MALFORMED_HEADERS.values(), ids=MALFORMED_HEADERS)
def test_malformed_headers_do_not_end_the_hub(header, start_hub, tmp_path):
    hub, invites = start_hub(2)
    with Adversary(invites[0], tmp_path) as mallory:
        mallory.send_raw("hub.mallory.heartbeat", header)
        assert status_of(mallory).run
    assert hub.process.poll() is None


def test_malformed_headers_of_an_unused_invite_do_not_end_the_hub(start_hub, tmp_path):
    hub, invites = start_hub(2)
    invite = Invite.read(invites[1])
    with Adversary(invites[0], tmp_path) as mallory, Stranger(invite) as stranger:
        stranger.send_raw(f"join.{invite.id}", MALFORMED_HEADERS["short"])
        assert status_of(mallory).run
    assert hub.process.poll() is None


def test_another_member_cannot_send_a_peer_away(start_hub, join, tmp_path):
    """Neither with headers that end a connection, nor with words in the name of the hub."""
    hub, invites = start_hub(3)
    anna = join(invites[0], "anna")
    anna.until("this machine: ")
    with Adversary(invites[1], tmp_path) as mallory:
        mallory.tell("anna", "note", b"\x1b[31mthe hub's owner has removed this machine from the run")
        mallory.send_raw("m.anna.mallory.note", MALFORMED_HEADERS["short"])
        assert "anna" in {peer.name for peer in status_of(mallory).peers}
    hub.stop()
    anna.until("connecting again")
    assert "removed" not in anna.printed
    assert anna.process.poll() is None
