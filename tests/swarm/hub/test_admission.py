"""Newcomers exchange invites for keys, many at once; an invite works once, and nobody is left half in."""

import asyncio
import threading
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import together
from thinpipe.core.errors import UserError
from thinpipe.core.numerics import Numerics
from thinpipe.swarm.hub.admission import Admission
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.peer.accept_invite import accept_invite
from thinpipe.swarm.peer.identity import load_identity
from thinpipe.transport.nats.client import connect
from thinpipe.transport.nats.connection import HubConnection

MANY = 8
NUMERICS = Numerics(version=1, torch="2.1.0")


@contextmanager
def open_admission(running, **settings):
    """Yields a way to make invites, and the lines for the hub's owner."""
    loop, printed = asyncio.new_event_loop(), []
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(asked):
        return asyncio.run_coroutine_threadsafe(asked, loop).result(timeout=300)

    async def start():
        client = await connect(
            running.url, running.fingerprint, running.broker.hub_credentials, inbox="_INBOX.hub", on_down=lambda _: None
        )
        options = HubOptions(run="r", public_url=running.url, peers=1, **settings)
        admission = Admission(
            running.broker, options, numerics=NUMERICS, print_line=printed.append, who_reads="all can read it"
        )
        await admission.open(client)
        return client, admission

    client, admission = call(start())
    try:
        yield lambda **what: call(admission.invite(**what)), printed
    finally:
        call(client.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=300)
        loop.close()


def test_many_join_at_once_and_each_is_let_in_once(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, printed):
        invites = [invite() for _ in range(MANY)]

        def join(index):
            return accept_invite(invites[index], tmp_path / str(index), name="", numerics=NUMERICS)

        found = together(*(lambda i=i: join(i) for i in range(MANY)))
        assert sorted(identity.name for identity in found) == [f"p{number}" for number in range(MANY)]
        assert sorted(printed) == sorted(f"p{number} was admitted with an invite" for number in range(MANY))
        assert all(invite.used_by for invite in running.broker.invites.values())
        for identity in found:
            HubConnection(identity.address).close()
        assert accept_invite(invites[0], tmp_path / "0", name="", numerics=NUMERICS) == found[0], "who we are already"
        with pytest.raises(UserError, match="this invite was used before, by p"):
            accept_invite(invites[0], tmp_path / "another", name="", numerics=NUMERICS)


def test_names_of_the_owners_machines_are_for_their_own_invites(tmp_path):
    """Otherwise a stranger could take the name first, and with it the segments that see the text."""
    keep = {"keep_ends": ("home", "p0")}
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running, **keep) as (invite, _):
        stranger, own = invite(), invite(for_name="home")
        with pytest.raises(UserError, match=r"the name home is kept for a machine of the hub's owner"):
            accept_invite(stranger, tmp_path / "a", name="home", numerics=NUMERICS)
        assert accept_invite(stranger, tmp_path / "a", name="", numerics=NUMERICS).name == "p1", "p0 is kept too"
        with pytest.raises(UserError, match="this invite is for the machine home: leave --name out"):
            accept_invite(own, tmp_path / "b", name="other", numerics=NUMERICS)
        assert accept_invite(own, tmp_path / "b", name="", numerics=NUMERICS).name == "home"


def test_everybody_is_told_who_can_read_the_data_before_joining(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        told = []

        def tell(*what):
            told.append((what, dict(running.broker.peers)))

        identity = accept_invite(invite(), tmp_path / "a", name="", numerics=NUMERICS, tell=tell)
        what = ("all can read it", "r", running.url, tmp_path / "a")
        assert told == [(what, {})], "the hub does not know this machine's key yet"
        assert list(running.broker.peers) == [identity.name]


def test_who_is_refused_keeps_the_invite(tmp_path):
    with running_broker(tmp_path / "hub", ()) as running, open_admission(running) as (invite, _):
        one, other = invite(), invite()
        for settings, message in (
            (
                {"name": "", "numerics": replace(NUMERICS, version=2)},
                "differs from the hub's \\(yours has numerics version 2, the hub's 1\\): ",
            ),
            (
                {"name": "", "numerics": replace(NUMERICS, torch="2.0.0")},
                "your torch differs from the hub's \\(yours is 2.0.0, the hub's 2.1.0\\): ",
            ),
            ({"name": "A b", "numerics": NUMERICS}, "'A b' is not a valid name"),
        ):
            with pytest.raises(UserError, match=message):
                accept_invite(one, tmp_path / "one", **settings)
        assert load_identity(tmp_path / "one") is None
        assert accept_invite(one, tmp_path / "one", name="anna", numerics=NUMERICS).name == "anna"
        with pytest.raises(UserError, match="there is already a peer named anna"):
            accept_invite(other, tmp_path / "other", name="anna", numerics=NUMERICS)
        with pytest.raises(UserError, match="belongs to another invite"):
            accept_invite(other, tmp_path / "one", name="", numerics=NUMERICS)
