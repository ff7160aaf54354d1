"""Strangers against a real server: 200 tries of each kind, each counted, none accepted.

Every kind begins or ends with the honest way, which must work: what nobody can do proves nothing.
"""

import asyncio
import base64
import json
import random
from contextlib import suppress
from urllib.parse import urlsplit

import nkeys
import pytest

from tests.swarm.attacks import TRIES, counted, heard, many, some
from tests.swarm.brokers import credentials_of, dialled, running_broker
from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.authority import Authority, AuthoritySeeds
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.nats.client import connect, pinned_context

NAMES = ("p0", "p1", "p2")


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with running_broker(tmp_path_factory.mktemp("ours"), NAMES) as running:
        yield running


@pytest.fixture(scope="module")
def other_run(tmp_path_factory):
    """Another hub, with peers of the same names."""
    with running_broker(tmp_path_factory.mktemp("theirs"), NAMES) as running:
        yield running


@pytest.fixture
def report():
    with counted() as ends:
        yield ends


async def sign_in(running, credentials, *, url=None):
    """As a program does: "accepted", or why not."""
    try:
        client = await connect(
            url or running.url, running.fingerprint, credentials, inbox="_INBOX.p0", on_down=lambda _: None
        )
    except UserError as error:
        known = ("does not accept our key", "not the hub that invited you")
        (why,) = (words for words in known if words in str(error))  # a server that is merely away refuses nobody
        return why
    await client.close()
    return "accepted"


def signature(seed, nonce):
    return base64.b64encode(nkeys.from_seed(bytearray(seed, "ascii")).sign(nonce)).decode()


PLAIN, TOO_EARLY = "without TLS", "before it is asked who it is"


def own_jwt(pair):
    """What a hub of its own says of its key."""
    return Authority(AuthoritySeeds.new()).peer_jwt("p0", pair.public_key)


class Stranger:
    """Has everything but a key: the address, the fingerprint, all public keys and JWTs, and logins it has overheard."""

    def __init__(self, running):
        self._running, self._own = running, KeyPair.new()
        self._peer = running.broker.peers["p0"]
        self._jwt = running.credentials["p0"].jwt
        self._hub = KeyPair.from_seed(running.broker.hub_credentials.seed).public_key

    def greetings(self, nonce, overheard):
        """What it says of itself, in many ways."""
        own = signature(self._own.seed, nonce)
        return [
            {},
            {"user": "hub", "pass": "hub"},
            {"user": self._hub, "pass": ""},
            {"auth_token": self._peer},
            {"nkey": self._peer},
            {"nkey": self._hub, "sig": ""},
            {"nkey": self._peer, "sig": own},
            {"nkey": self._hub, "sig": own},
            {"nkey": self._own.public_key, "sig": own},
            {"nkey": self._peer, "sig": base64.b64encode(random.randbytes(64)).decode()},
            {"nkey": self._peer, "sig": overheard},
            {"jwt": "e30.e30.e30", "nkey": self._peer, "sig": own},
            {"jwt": self._jwt, "sig": own},
            {"jwt": self._jwt, "sig": overheard},
            {"jwt": own_jwt(self._own), "sig": own},
            PLAIN,
            TOO_EARLY,
        ]

    async def try_once(self, choose):
        """What the server said; `choose` is given the nonce and returns a greeting."""
        parts = urlsplit(self._running.url)
        plain = choose(b"") == PLAIN
        context = None if plain else pinned_context(self._running.fingerprint)
        name = None if plain else "hub"
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context, server_hostname=name)
        try:
            info = {} if plain else json.loads((await asyncio.wait_for(reader.readline(), 5)).removeprefix(b"INFO "))
            greeting = choose(info.get("nonce", "").encode())
            if greeting != TOO_EARLY:
                said = {} if greeting == PLAIN else greeting
                writer.write(b"CONNECT " + json.dumps({"verbose": False, "pedantic": False, **said}).encode() + b"\r\n")
            writer.write(b"PUB m.p1.p0.d 4\r\nfour\r\nPING\r\n")
            answer = b""
            with suppress(ConnectionError):
                while b"PONG" not in answer and (some := await asyncio.wait_for(reader.read(4096), 5)):
                    answer += some
            return answer
        finally:
            writer.close()
            with suppress(OSError):
                await asyncio.wait_for(writer.wait_closed(), 5)


def test_a_stranger_without_a_key(running, report):
    stranger, nonces = Stranger(running), []

    def honestly(nonce):
        nonces.append(nonce)
        return {"sig": signature(running.credentials["p0"].seed, nonce), "jwt": running.credentials["p0"].jwt}

    async def check():
        async with dialled(running, "hub", running.broker.hub_credentials) as (hub, _):
            came = await heard(hub, "m.>")
            assert b"PONG" in await stranger.try_once(honestly)
            overheard = signature(running.credentials["p0"].seed, nonces[-1])

            async def attempt(number):
                ways = len(stranger.greetings(b"", overheard))
                answer = await stranger.try_once(lambda nonce: stranger.greetings(nonce, overheard)[number % ways])
                if b"PONG" in answer:
                    return "accepted"
                return "refused" if b"Authorization Violation" in answer else "hung up on"

            await many(attempt, report)
            await hub.flush()
            assert came == [("m.p1.p0.d", b"four")]  # of the honest one

    asyncio.run(check())
    assert report["hung up on"] <= TRIES / 10  # who speaks no TLS is told nothing


def test_an_invite_that_was_revoked(running, report):
    broker = running.broker
    invite, other = (broker.add_invite(url=running.url, run="r", seconds=3600) for _ in range(2))

    async def check():
        assert await sign_in(running, invite.credentials) == "accepted"
        await asyncio.to_thread(broker.revoke_invite, invite.id)
        await many(lambda _: sign_in(running, invite.credentials), report)
        assert await sign_in(running, other.credentials) == "accepted"

    asyncio.run(check())
    assert report["does not accept our key"] == TRIES


def test_a_key_of_another_run(running, other_run, report):
    async def check():
        theirs = [
            *other_run.credentials.values(),
            other_run.broker.hub_credentials,
            other_run.broker.admin_credentials,
        ]
        for each in theirs:
            assert await sign_in(other_run, each) == "accepted"
        await many(lambda number: sign_in(running, theirs[number % len(theirs)]), report)

    asyncio.run(check())
    assert report["does not accept our key"] == TRIES


def test_another_hub_at_our_hubs_address_is_told_nothing(running, other_run, report):
    """It even knows our key, and would let us in: the certificate alone gives it away."""
    pair = KeyPair.new()
    other_run.broker.add_peer("ours", pair.public_key)
    ours = credentials_of(other_run.broker, "ours", pair)

    async def check():
        async with dialled(other_run, "admin", other_run.broker.admin_credentials) as (admin, _):
            came = await heard(admin, "$SYS.ACCOUNT.*.CONNECT")
            await many(lambda _: sign_in(running, ours, url=other_run.url), report)
            assert await sign_in(other_run, ours) == "accepted"
            await some(came)
            assert [json.loads(data)["client"]["user"] for _, data in came] == [pair.public_key]  # once: the honest one

    asyncio.run(check())
    assert report["not the hub that invited you"] == TRIES
