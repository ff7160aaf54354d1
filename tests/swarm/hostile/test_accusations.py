"""A member that accuses others, or ends generation after generation: it removes nobody, and is suspended."""

import msgspec
import pytest

from tests.swarm.hostile.adversary import Adversary
from tests.swarm.hubs import report
from thinpipe.swarm.protocol.messages import Accusation, Assignment
from thinpipe.swarm.protocol.status import Status

PATIENT = ("--hub.patience-seconds", "2")


def status_of(member):
    return msgspec.msgpack.decode(member.ask("status", b"", 20), type=Status)


def members_of(status):
    return {peer.name for peer in status.peers} | set(status.absent)


@pytest.mark.parametrize("honest", [pytest.param(("anna",), marks=pytest.mark.long), ("anna", "bert")], ids=len)
def test_who_accuses_again_and_again_removes_nobody_and_is_suspended(honest, start_hub, join, tmp_path):
    hub, invites = start_hub(len(honest) + 1, *PATIENT)
    peers = [join(invite, name) for invite, name in zip(invites, honest, strict=False)]
    with Adversary(invites[-1], tmp_path) as mallory:
        answer, accused = mallory.until_assigned(), []
        for attempt in range(3):
            accused.append(next(name for name in answer.names if name != "mallory"))
            lie = Accusation(name=accused[-1], step=1000 * (attempt + 1), what="sent bad values")
            answer = mallory.next(accusation=lie, error="it sent bad values", report=report())
            if attempt < 2 and not isinstance(answer, Assignment):
                answer = mallory.until_assigned()
        hub.until("mallory is suspended for 5 min")
        hub.until(r"step: +10 ")
        status = status_of(mallory)
        assert members_of(status) == {"mallory", *honest}
        assert "mallory" in status.suspended
    assert [peer.process.poll() for peer in peers] == [None] * len(honest)
    assert hub.process.poll() is None
    assert "removed" not in hub.printed
