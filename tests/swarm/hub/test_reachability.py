"""What an attempt to reach the hub's address shows, and what a real hub says of a peer that comes from this machine."""

import asyncio
import socket

import msgspec
import pytest

from tests.swarm.brokers import running_broker
from tests.swarm.hubs import identity_of, running_hub
from thinpipe.config.hub import JoinConfig
from thinpipe.swarm.hub.disconnects import Disconnects
from thinpipe.swarm.hub.reachability import Reachability
from thinpipe.swarm.peer.reach import tell_reach, try_address
from thinpipe.swarm.protocol.messages import ReachReply, ReachRequest
from thinpipe.transport.nats.connection import Address, HubConnection

PUBLIC = "8.8.4.4"


class Asked:
    """A hub at this address, asked by peers whose connections come from where the test says."""

    def __init__(self, url=f"tls://{PUBLIC}:4222"):
        self.printed, self.seen = [], ""
        self.service = Reachability(url, self._addresses_of, self.printed.append)

    async def _addresses_of(self, _peer):
        return {self.seen} - {""}

    def ask(self, seen, **request):
        self.seen = seen
        message = ReachRequest(**{"address": f"{PUBLIC}:4222"} | request)
        reply = asyncio.run(self.service("bert", msgspec.msgpack.encode(message)))
        return msgspec.msgpack.decode(reply, type=ReachReply).text


def test_who_comes_from_another_network_shows_that_others_can():
    hub = Asked()
    assert hub.ask("9.9.9.9") == (
        f"{PUBLIC}:4222 was reached from outside the hub's network, by bert (9.9.9.9): others can too"
    )
    assert len(hub.printed) == 1
    assert hub.printed[0].replace(" (9.9.9.9)", "") == hub.service.text, "other peers do not read the address"
    hub.ask("9.9.9.9")
    hub.ask("192.168.1.7")
    assert len(hub.printed) == 1, "the owner reads it once"


@pytest.mark.parametrize("seen", ["192.168.1.1", "100.64.1.1", "127.0.0.1", PUBLIC, ""])
def test_from_inside_it_stays_unknown_whether_others_can(seen):
    hub = Asked()
    assert hub.ask(seen).endswith("whether it can be from outside, nobody has tried yet")
    hub.ask("9.9.9.9")
    assert len(hub.printed) == 2
    assert "others can too" in hub.service.text


def test_an_address_that_leads_nowhere_or_elsewhere_is_named():
    hub = Asked()
    lost = {"outcome": "unreachable", "error": "timed out"}
    assert "cannot reach 8.8.4.4:4222 (timed out). Many routers do not lead back" in hub.ask("192.168.1.7", **lost)
    assert "Forward the port, and open it in the firewall" in hub.ask("9.9.9.9", **lost)
    assert "is not this hub: check to which machine" in hub.ask("9.9.9.9", outcome="another_certificate")
    assert "came by home.example:4222; the invites have" in hub.ask("9.9.9.9", address="home.example:4222")
    assert len(hub.printed) == 3


def test_a_hub_for_this_machine_alone_says_nothing():
    hub = Asked("tls://127.0.0.1:4222")
    assert (hub.ask("127.0.0.1", address="127.0.0.1:4222"), hub.printed) == ("", [])
    private = Asked("tls://192.168.1.5:4222")
    assert private.ask("192.168.1.7", address="192.168.1.5:4222") == (
        "192.168.1.5:4222 was reached from inside the hub's network, by bert (192.168.1.7)"
    )


def test_the_server_says_from_where_a_peer_comes(tmp_path):
    async def addresses(running):
        disconnects = Disconnects(running.broker, None)
        await disconnects.open()
        try:
            return [await disconnects.addresses_of(name) for name in ("p0", "p1", "nobody")]
        finally:
            await disconnects.close()

    with running_broker(tmp_path, ("p0", "p1")) as running:
        credentials = running.credentials["p0"]
        address = Address(url=running.url, fingerprint=running.fingerprint, name="p0", credentials=credentials)
        connection = HubConnection(address)
        try:
            assert asyncio.run(addresses(running)) == [{"127.0.0.1"}, set(), set()]
        finally:
            connection.close()


def test_a_peer_tries_the_address_of_the_invites_where_it_came_by_another(run_config):
    with running_hub(run_config, ("p0",), public_url="tls://192.168.77.5:1") as running, running.connection("p0") as p0:
        identity, said = identity_of(p0.address), []
        tell_reach(p0, identity, JoinConfig(invite="joined/p0"), said.append)
        came = f"p0 (127.0.0.1) came by {identity.url[6:]}"
        assert said == [f"{came}; the invites have 192.168.77.5:1, which it did not try"]
        assert running.printed[-1:] == said
        assert try_address(identity.url, identity.fingerprint).outcome == "reached"
        assert try_address(identity.url, "00" * 32).outcome == "another_certificate"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tls://127.0.0.1:{listener.getsockname()[1]}"
    gone = try_address(url, identity.fingerprint)
    assert (gone.outcome, gone.address) == ("unreachable", url[6:])
    assert "refused" in gone.error
