"""A member sends to the hub or to another peer as fast as it can: it is named, and the others go on."""

import time

import msgspec
import psutil
import pytest

from tests.programs import wait_for_event
from tests.swarm.hostile.adversary import Adversary, Stranger
from tests.swarm.hostile.flooder import Flooder
from thinpipe.core.events import Step
from thinpipe.core.hub_events import GenerationEnded
from thinpipe.core.numerics import numerics
from thinpipe.swarm.protocol.file_messages import WriteChunk
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.messages import InviteCheck, NextRequest
from thinpipe.swarm.protocol.probe import Probe
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.store_messages import StoreRequest

STEPS = 20
"""Steps that an honest peer has to make during a flood."""
MEMORY_NBYTES = 200 << 20
"""How much a program may grow under a flood of gigabytes."""

FLOODS = {
    "store": lambda: StoreRequest(what="wait", keys=["never"], value=bytes((2 << 20) - 300), wait_seconds=3600.0),
    "heartbeat": lambda: bytes(2_000_000),
    "next": lambda: NextRequest(incarnation="a", numerics=numerics()),
    "write_file": lambda: WriteChunk(name="step-00000001/unknown.safetensors", offset=0, data=bytes(1 << 20)),
}
"""A message to each of these services."""


@pytest.fixture
def members(start_hub, join, tmp_path):
    """The hub, an honest peer that computes all there is, and one that does not."""
    hub, invites = start_hub(1, "--hub.invites", 2)
    anna = join(invites[0], "anna")
    anna.until("generation 1: ")
    with Adversary(invites[1], tmp_path) as mallory:
        yield hub, anna, mallory


def memory_of(program):
    return psutil.Process(program.process.pid).memory_info().rss


def wait_for_steps(config, number):
    """So many steps more than there are."""
    newest = wait_for_event(config, Step)
    for _ in range(number):
        newest = wait_for_event(config, Step, after=newest)


def assert_goes_on(run_config, mallory, programs, started):
    """Steps are made, a request is answered, memory has not grown, and no generation has ended."""
    wait_for_steps(run_config, STEPS)
    status = msgspec.msgpack.decode(mallory.ask("status", b""), type=Status)
    assert status.generation == 1
    for program, before in zip(programs, started, strict=True):
        assert program.process.poll() is None
        assert memory_of(program) - before < MEMORY_NBYTES
    return status


@pytest.mark.parametrize("service", FLOODS)
def test_who_floods_a_service_is_named_and_the_others_go_on(service, members, run_config):
    hub, anna, mallory = members
    message = FLOODS[service]()
    body = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    started = [memory_of(program) for program in (hub, anna)]
    subject = f"hub.mallory.{service}"
    with Flooder(mallory.connection.address, subject, body, reply="_INBOX.mallory.z") as flooder:
        hub.until("mallory floods the hub")
        status = assert_goes_on(run_config, mallory, (hub, anna), started)
        assert flooder.sent > 100
    assert [trouble for trouble in status.troubles if trouble.startswith("mallory floods")]
    assert "anna floods" not in hub.printed
    assert hub.printed.count("floods the hub") == 1
    status = msgspec.msgpack.decode(mallory.ask("status", b""), type=Status)
    assert {peer.name for peer in status.peers} >= {"anna"}


def test_who_floods_within_what_a_service_takes_delays_nobody(members, run_config):
    """Megabytes that a probe may have: the server holds a few of them for the hub, which handles them last."""
    hub, anna, mallory = members
    started = [memory_of(program) for program in (hub, anna)]
    with Flooder(mallory.connection.address, "hub.mallory.probe", bytes(1 << 20), reply="_INBOX.mallory.z") as flooder:
        while flooder.sent < 1000:
            time.sleep(0.01)
        assert_goes_on(run_config, mallory, (hub, anna), started)
    assert "connected again" not in hub.printed


@pytest.mark.parametrize("question", [InviteCheck(), Probe(answer_nbytes=1 << 20)], ids=["check", "probe"])
def test_who_floods_with_an_invite_is_named_and_the_peers_go_on(question, start_hub, join, run_config, tmp_path):
    """The hub answered every question of an invite, one after the other, before it answered a peer again."""
    hub, invites = start_hub(1, "--hub.invites", 3)
    anna = join(invites[0], "anna")
    anna.until("generation 1: ")
    started, invite = [memory_of(program) for program in (hub, anna)], Invite.read(invites[1])
    subject, body = f"join.{invite.id}", msgspec.msgpack.encode(question)
    with (
        Stranger(invite) as stranger,
        Flooder(stranger.connection.address, subject, body, reply=f"_INBOX.{invite.id}.z") as flooder,
    ):
        hub.until(f"the holder of invite {invite.id} floods the hub")
        with Adversary(invites[2], tmp_path, "bob") as bob:
            status = assert_goes_on(run_config, bob, (hub, anna), started)
        assert flooder.sent > 100
    assert [trouble for trouble in status.troubles if trouble.startswith(f"{invite.id} floods `join`")]
    assert "dials again" not in hub.printed


@pytest.mark.parametrize("kind", ["data", "note"])
def test_mail_of_a_member_that_is_no_neighbour_does_not_reach_a_peer(kind, members, run_config):
    hub, anna, mallory = members
    started = [memory_of(program) for program in (hub, anna)]
    with Flooder(mallory.connection.address, f"m.anna.mallory.{kind}", bytes(1 << 20)) as flooder:
        assert_goes_on(run_config, mallory, (hub, anna), started)
        deadline = time.monotonic() + 60
        while flooder.sent < 1000:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert_goes_on(run_config, mallory, (hub, anna), started)
    assert not [event for event in [wait_for_event(run_config, Step)] if isinstance(event, GenerationEnded)]
