"""Peers with a good key that lie, against a real server: 200 tries of each kind, each counted, none accepted."""

import asyncio
import itertools
from contextlib import closing

import msgspec
import pytest

from tests.swarm.attacks import TRIES, counted, heard, some
from tests.swarm.brokers import dialled, running_broker
from tests.transport.nats_peers import address
from thinpipe.swarm.hub.services.serve import Services
from thinpipe.swarm.hub.services.store import StoreService
from thinpipe.transport.nats.connection import HubConnection
from thinpipe.transport.nats.store_messages import StoreReply, StoreRequest


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_broker(tmp_path_factory.mktemp("liars"), ("p0", "p1", "p2")) as running:
        yield running


@pytest.fixture
def report():
    with counted() as ends:
        yield ends


def test_a_peer_that_writes_as_another(running, report):
    subjects = itertools.cycle(
        f"{subject}{end}"
        for subject in ("m.p1.p2.", "m.p2.p1.", "m.p1.hub.", "hub.p1.", "hub.p2.", "bcast.", "_INBOX.p1.", "$KV.run.")
        for end in ("data", "credit", "heartbeat", "store", "generation_over", "lost")
    )

    async def check():
        hub, liar = (
            dialled(running, "hub", running.broker.hub_credentials),
            dialled(running, "p0", running.credentials["p0"]),
        )
        async with hub as (everybody, _), liar as (peer, faults):
            came = await heard(everybody, ">")
            for _ in range(TRIES):
                before, subject = len(came), next(subjects)
                await peer.publish(subject, b"forged")
                await peer.flush()
                await everybody.flush()
                refused = f'permissions violation for publish to "{subject.lower()}"' in str(faults[-1:]).lower()
                report["accepted" if len(came) > before or not refused else "refused"] += 1
            assert len(faults) == TRIES
            await peer.publish("m.p1.p0.d", b"honest")
            await some(came)
            assert came == [("m.p1.p0.d", b"honest")]

    asyncio.run(check())


def forgeries(number):
    """Ways to have somebody answered who did not ask: subject, question, and whether the server forbids it."""
    wanted = StoreRequest(what="set", keys=["forged"], value=b"forged")
    return [
        ("hub.p0.store", msgspec.msgpack.encode(wanted), False),
        ("hub.p0.store", b"nonsense", False),
        ("hub.p0.nobody", b"", False),
        ("m.p2.p0.d", b"forged", False),
        ("$JS.API.DIRECT.GET.run", b'{"seq": 1}', True),
        ("$JS.API.DIRECT.GET.run.said", b"", True),
        ("$JS.API.STREAM.MSG.GET.run", b'{"seq": 1}', True),
        ("$JS.API.INFO", b"", True),
    ][number % 8]


def test_a_peer_that_has_answers_sent_to_others(running, report):
    """The server does not look at where an answer is to go: only the hub, and the rights of peers, can prevent it."""
    victims = itertools.cycle(("m.p1.p2.d", "m.p1.hub.c", "_INBOX.p1.x", "bcast.generation_over", "bcast.lost"))

    async def check():
        people = (dialled(running, name, running.credentials[name]) for name in ("p0", "p1"))
        hub, liar, victim = dialled(running, "hub", running.broker.hub_credentials), *people
        async with hub as (everybody, _), liar as (peer, faults), victim as (other, _):
            await Services({"store": StoreService()}).open(everybody, running.credentials)
            came = [await heard(other, subject) for subject in ("m.p1.>", "_INBOX.p1.>", "bcast.>")]
            for number in range(TRIES):
                subject, question, forbidden = forgeries(number)
                before = len(faults)
                await peer.publish(subject, question, reply=next(victims))
                for client in (peer, everybody, peer, other):  # there and back
                    await client.flush()
                assert (len(faults) > before) is forbidden, subject
                report["accepted" if any(came) else "refused" if forbidden else "not answered"] += 1
            asked = StoreRequest(what="get", keys=["forged"])
            answer = await peer.request("hub.p0.store", msgspec.msgpack.encode(asked), timeout=120)
            assert (
                msgspec.msgpack.decode(answer.data, type=StoreReply).value == b"forged"
            )  # it was heard, and not answered
            await asyncio.sleep(0.2)
            assert came == [[], [], []]

    asyncio.run(check())


def test_mail_that_wants_an_answer_or_has_headers_is_dropped(running, report):
    """So does mail look that came by way of a service: a post takes none of it."""

    async def check():
        async with dialled(running, "p0", running.credentials["p0"]) as (peer, faults):
            for number in range(TRIES):
                marked = {"reply": "m.p2.p0.d"} if number % 2 else {"headers": {"Nats-Subject": "said"}}
                await peer.publish("m.p1.p0.d", b"forged", **marked)
                report["accepted" if came else "dropped"] += 1
            await peer.publish("m.p1.p0.d", b"honest")
            await some(came)
            assert came == [("p0", b"honest")]  # in order: those before it are not under way any more
            assert not faults

    came = []
    with closing(HubConnection(address(running, "p1"))) as connection:
        connection.subscribe("d", lambda sender, data: came.append((sender, data)), senders=["p0"])
        asyncio.run(check())
