"""What a peer may say and hear, tried on a real server."""

import asyncio

import pytest
from nats.js.errors import ServiceUnavailableError

from tests.swarm.attacks import some
from tests.swarm.brokers import Faults, dialled, running_broker
from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.authority import Authority, AuthoritySeeds
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.nats.client import Credentials, connect

QUIET_SECONDS = 0.2


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_broker(tmp_path_factory.mktemp("permissions")) as running:
        yield running


async def arrivals(client, subject):
    came = []

    async def arrived(message):
        came.append((message.subject, message.data))

    await client.subscribe(subject, cb=arrived)
    await client.flush()
    return came


def test_a_peer_writes_as_itself_and_hears_its_mail_the_hub_and_broadcasts(running):
    async def check():
        p0, p1, hub = (
            dialled(running, *who) for who in (*running.credentials.items(), ("hub", running.broker.hub_credentials))
        )
        async with p0 as (sender, faults), p1 as (receiver, more_faults), hub as (everybody, _):
            mail, news = await arrivals(receiver, "m.p1.*.d"), await arrivals(receiver, "bcast.>")
            heard = await arrivals(everybody, "hub.>")
            await sender.publish("m.p1.p0.d", b"mail")
            await sender.publish("hub.p0.beat", b"beat")
            await everybody.publish("bcast.lost", b"news")
            for came in (mail, news, heard):
                await some(came)
            assert mail == [("m.p1.p0.d", b"mail")]
            assert news == [("bcast.lost", b"news")]
            assert heard == [("hub.p0.beat", b"beat")]
            assert not faults
            assert not more_faults

    asyncio.run(check())


@pytest.mark.parametrize(
    "subject",
    ["m.p1.p1.d", "m.p0.p1.d", "m.p1.hub.d", "hub.p1.beat", "bcast.lost", "_INBOX.p1.x", "join.i0", "m.p1.p0", "other"],
)
def test_a_peer_does_not_write_as_another(running, subject):
    async def check():
        hub, p0 = (
            dialled(running, "hub", running.broker.hub_credentials),
            dialled(running, "p0", running.credentials["p0"]),
        )
        async with hub as (everybody, _), p0 as (peer, faults):
            came = await arrivals(everybody, ">")
            await peer.publish(subject, b"forged")
            assert f'permissions violation for publish to "{subject.lower()}"' in str(await faults.wait()).lower()
            await asyncio.sleep(QUIET_SECONDS)
            assert came == []

    asyncio.run(check())


@pytest.mark.parametrize(
    "subject",
    [">", "m.>", "m.*.p1.d", "m.p1.>", "m.p1.*.d", "_INBOX.>", "_INBOX.p1.>", "hub.>", "hub.p0.x", "join.*", "$SYS.>"],
)
@pytest.mark.parametrize("queue", ["", "workers"])
def test_a_peer_does_not_read_what_is_not_for_it(running, subject, queue):
    async def check():
        hub, p0 = (
            dialled(running, "hub", running.broker.hub_credentials),
            dialled(running, "p0", running.credentials["p0"]),
        )
        async with hub as (everybody, _), p0 as (peer, faults):
            came = []

            async def arrived(message):
                came.append(message)

            await peer.subscribe(subject, queue=queue, cb=arrived)
            assert "permissions violation for subscription" in str(await faults.wait()).lower()
            for written in ("m.p1.p1.d", "_INBOX.p1.x", "hub.p1.x", "hub.p0.x", "join.i0"):
                await everybody.publish(written, b"private")
            await everybody.flush()
            await asyncio.sleep(QUIET_SECONDS / 4)
            assert came == []

    asyncio.run(check())


@pytest.mark.parametrize("subject", ["m.p1.p2.d", "bcast.lost"])
def test_a_trace_is_not_sent_where_its_asker_may_not_write(running, subject):
    async def check():
        hub, p0 = (
            dialled(running, "hub", running.broker.hub_credentials),
            dialled(running, "p0", running.credentials["p0"]),
        )
        async with hub as (everybody, _), p0 as (peer, faults):
            came = await arrivals(everybody, subject)
            await peer.publish("m.p1.p0.d", b"", headers={"Nats-Trace-Dest": subject})
            assert "permissions violation" in str(await faults.wait()).lower()
            await asyncio.sleep(QUIET_SECONDS)
            assert came == []

    asyncio.run(check())


@pytest.mark.parametrize("subject", ["$JS.API.INFO", "$JS.API.STREAM.NAMES", "$KV.state.epoch", "$SYS.REQ.SERVER.PING"])
def test_the_servers_own_services_are_not_for_peers(running, subject):
    async def check():
        async with dialled(running, "p0", running.credentials["p0"]) as (peer, faults):
            answers = await arrivals(peer, "_INBOX.p0.>")
            await peer.publish(subject, b"", reply="_INBOX.p0.answer")
            assert "permissions violation for publish" in str(await faults.wait()).lower()
            await asyncio.sleep(QUIET_SECONDS)
            assert answers == []

    asyncio.run(check())


def test_nobody_has_jetstream(running):
    """Its answers go to any subject that the requester names."""

    async def check():
        async with dialled(running, "hub", running.broker.hub_credentials) as (hub, _):
            with pytest.raises(ServiceUnavailableError):
                await hub.jetstream(timeout=120).account_info()

    asyncio.run(check())


def test_a_peer_with_too_long_a_message_is_cut_off(running):
    longest = 2112 << 10

    async def check():
        async with dialled(running, "p1", running.credentials["p1"]) as (other, _):
            came = await arrivals(other, "m.p1.>")
            async with dialled(running, "p0", running.credentials["p0"]) as (peer, faults):
                for nbytes in (longest, longest + 1):
                    await peer.publish("m.p1.p0.d", bytes(nbytes))
                assert "connection to the hub failed" in str(await faults.wait())
            await other.flush()
            assert [len(data) for _, data in came] == [longest]

    asyncio.run(check())


def test_subscriptions_of_peers_are_bounded(running):
    async def check():
        async with dialled(running, "p0", running.credentials["p0"]) as (peer, faults):
            for number in range(1025):
                await peer.subscribe(f"bcast.{number}")
            assert "maximum subscriptions" in str(await faults.wait()).lower()

    asyncio.run(check())


def test_a_strangers_key_is_refused(running):
    async def check():
        faults, pair = Faults(), KeyPair.new()
        stranger = Credentials(seed=pair.seed, jwt=Authority(AuthoritySeeds.new()).peer_jwt("p0", pair.public_key))
        with pytest.raises(UserError, match="does not accept our key"):
            await connect(running.url, running.fingerprint, stranger, inbox="_INBOX.p0", on_down=faults)
        assert not faults  # who never was up cannot go down

    asyncio.run(check())
