"""The homes are what they say they are: rates, routers, counters, captures; and a hub is reached from all of them."""

import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.netns.namespaces import run
from tests.swarm import network_namespaces as homes
from tests.swarm.brokers import running_broker
from tests.swarm.network_namespaces import HomeLink, Homes, capture, frames
from tests.transport.nats_peers import hub_services

_MISSING = homes.missing()
pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
needs_tshark = pytest.mark.skipif(
    not (shutil.which("tshark") and shutil.which("tcpdump")), reason="captures need tshark and tcpdump: apt-get install"
)

PORT = 5000
WARM_SECONDS, MEASURED_SECONDS = 0.4, 1.0
LIMIT = 120
"""Seconds for what must come."""
FRAME_NBYTES, SEGMENT_NBYTES = 1514, 1448


@contextlib.contextmanager
def connection(dialler, listener, address):
    """Two ends, each a socket of its own place."""
    with listener.inside():
        server = socket.create_server(("0.0.0.0", PORT))
    with server:
        server.settimeout(LIMIT)
        with dialler.inside():
            client = socket.create_connection((address, PORT), timeout=LIMIT)
        with client:
            other, _ = server.accept()
            with other:
                yield client, other


def measured_rate(sender, receiver):
    """Bits per second on the line, frames included, after TCP has warmed up."""
    stop = threading.Event()
    sender.settimeout(LIMIT)
    receiver.settimeout(LIMIT)

    def send():
        with contextlib.suppress(OSError):
            while not stop.is_set():
                sender.sendall(bytes(32_768))

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    try:
        received, began = 0, None
        warm = time.monotonic() + WARM_SECONDS
        while began is None or time.monotonic() < began + MEASURED_SECONDS:
            nbytes = len(receiver.recv(1 << 18))
            if began is not None:
                received += nbytes
            elif time.monotonic() > warm:
                began = time.monotonic()
        return received * 8 / (time.monotonic() - began) * FRAME_NBYTES / SEGMENT_NBYTES
    finally:
        stop.set()
        receiver.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=LIMIT)
        assert not thread.is_alive()


@pytest.mark.quiet
@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("mbps", [20, 80])
@pytest.mark.parametrize("where", ["home", "home behind a router", "hub"])
def test_a_line_has_its_rate(where, mbps, way):
    slow = HomeLink(**{way: f"{mbps}mbps"}, nat="router" in where)
    homes_and_hub = ([HomeLink(nat=True)], slow) if where == "hub" else ([slow], HomeLink())
    with Homes(homes_and_hub[0], hub=homes_and_hub[1]) as net:
        place = net.hub if where == "hub" else net.homes[0]
        with connection(net.homes[0], net.hub, net.hub.address) as (at_home, at_hub):
            mine, theirs = (at_hub, at_home) if where == "hub" else (at_home, at_hub)
            before, began = place.counters(), time.monotonic()
            rate = measured_rate(*((mine, theirs) if way == "up" else (theirs, mine)))
            seconds, after = time.monotonic() - began, place.counters()
    what = "tx_bytes" if way == "up" else "rx_bytes"
    counted = (after[what] - before[what]) * 8 / seconds
    print(f"\n{where}, {way} {mbps} Mbit/s: {rate / 1e6:.1f} received, {counted / 1e6:.1f} counted", end="")
    assert 0.8 * mbps < rate / 1e6 < 1.1 * mbps  # a busy machine may be slower than its line, never faster
    assert 0.8 * mbps < counted / 1e6 < 1.1 * mbps


@pytest.mark.quiet
def test_the_other_way_of_a_line_has_a_rate_of_its_own():
    with (
        Homes([HomeLink(up="20mbps", down="80mbps", nat=True)]) as net,
        connection(net.homes[0], net.hub, net.hub.address) as (at_home, at_hub),
    ):
        assert 0.8 * 80 < measured_rate(at_hub, at_home) / 1e6 < 1.1 * 80


@pytest.mark.quiet
def test_a_latency_holds_each_way():
    with (
        Homes([HomeLink(nat=True)], latency="20ms") as net,
        connection(net.homes[0], net.hub, net.hub.address) as (at_home, at_hub),
    ):
        for end in (at_home, at_hub):
            end.settimeout(LIMIT)
        times = []
        for _ in range(5):
            began = time.monotonic()
            at_home.sendall(b"there")
            at_hub.sendall(at_hub.recv(16))
            assert at_home.recv(16) == b"there"
            times.append(time.monotonic() - began)
    assert 0.039 < min(times) < 0.075


def test_nobody_can_dial_into_a_home_behind_a_router():
    with Homes([HomeLink(nat=True), HomeLink(nat=True), HomeLink()]) as net:
        behind, neighbour, open_home = net.homes
        # A stranger who knows the private network and sends to it by way of the router: no provider would carry that.
        run("ip", "-n", net.hub.namespace, "route", "add", "192.168.1.0/24", "via", behind.address)
        with behind.inside():
            server = socket.create_server(("0.0.0.0", PORT))
        with server:
            server.settimeout(0.1)
            tries = [(net.hub, behind.address), (net.hub, "192.168.1.2"), (neighbour, behind.address)]
            for stranger, address in tries:
                with stranger.inside(), pytest.raises(OSError, match=r"timed out|unreachable|refused"):
                    socket.create_connection((address, PORT), timeout=0.7)
            with pytest.raises(TimeoutError):
                server.accept()
            with behind.inside(), socket.create_connection(("192.168.1.2", PORT), timeout=LIMIT):
                server.settimeout(LIMIT)
                server.accept()[0].close()  # it does listen
        for home in (behind, neighbour):  # outwards all is open, to the hub and to a home without a router
            for reached in (net.hub, open_home):
                with connection(home, reached, reached.address) as (mine, theirs):
                    assert theirs.getpeername()[0] == home.address
                    assert mine.getsockname()[0] == "192.168.1.2"
        with connection(net.hub, open_home, open_home.address):
            pass  # who has no router can be dialled


def ask_from(home, running, name, value):
    asked = {"url": running.url, "fingerprint": running.fingerprint, "name": name, "key": name, "value": value}
    command = [sys.executable, "-m", "tests.swarm.store_client", json.dumps(asked)]
    return json.loads(
        home.run(command, {"CREDENTIALS": json.dumps(dataclasses.asdict(running.credentials[name]))}).stdout
    )


@contextlib.contextmanager
def hub_in(net, folder, peers):
    with (
        net.hub.inside(),
        running_broker(folder, peers, host=net.hub.address, port=4222) as running,
        hub_services(running),
    ):
        yield running


def test_a_hub_answers_friends_behind_their_routers(tmp_path):
    links = [HomeLink(up="20mbps", down="80mbps", nat=True), HomeLink(up="20mbps", nat=True), HomeLink(up="20mbps")]
    names = ("p0", "p1", "p2")
    with Homes(links, hub=HomeLink(up="20mbps", down="80mbps")) as net, hub_in(net, tmp_path, names) as running:
        assert running.url == "tls://203.0.113.1:4222"
        for home, name in zip(net.homes, names, strict=True):
            assert ask_from(home, running, name, f"I am {name}") == f"I am {name}"


@needs_tshark
def test_a_capture_of_the_line_shows_no_word_of_what_was_said(tmp_path):
    path, secret, in_clear = tmp_path / "line.pcap", "a-secret-of-the-run", "a-word-in-clear"
    with (
        Homes([HomeLink(nat=True)]) as net,
        hub_in(net, tmp_path, ("p0",)) as running,
        capture(net.hub, path),
    ):
        assert ask_from(net.homes[0], running, "p0", secret * 50) == secret * 50
        with connection(net.homes[0], net.hub, net.hub.address) as (mine, theirs):
            mine.sendall(in_clear.encode())
            theirs.settimeout(LIMIT)
            assert theirs.recv(64) == in_clear.encode()
    assert frames(path, f'frame contains "{in_clear}"') == 1  # the search does find
    for words in (secret, "_INBOX.p0", "hub.p0.store", "CONNECT", "INFO"):
        assert frames(path, f'frame contains "{words}"') == 0, words
    assert frames(path, "tls.app_data", "-d", "tcp.port==4222,tls") >= 6
    assert frames(path, "tls.handshake.extensions.supported_version == 0x0304", "-d", "tcp.port==4222,tls") >= 2


def test_nothing_stays_of_homes_that_failed():
    started = []

    def fail_at_home():
        with Homes([HomeLink(nat=True, up="1mbps")], latency="1ms") as net:
            child = net.homes[0].popen(["sh", "-c", "sleep 77 & echo $!; wait"], stdout=subprocess.PIPE)
            started.append((net, int(child.stdout.readline())))
            net.hub.popen(["sleep", "77"])
            raise KeyError

    with pytest.raises(KeyError):
        fail_at_home()
    ((net, grandchild),) = started
    assert net.name not in run("ip", "netns", "list")
    with contextlib.suppress(FileNotFoundError):  # it has ended, and may wait to be collected by its new parent
        assert ") Z " in Path(f"/proc/{grandchild}/stat").read_text()


def test_two_nets_do_not_know_each_other():
    with Homes([HomeLink(nat=True)]) as one, Homes([HomeLink(nat=True)]) as other:
        with one.hub.inside():
            server = socket.create_server(("0.0.0.0", PORT))
        with server, other.homes[0].inside(), pytest.raises(ConnectionRefusedError):
            socket.create_connection((one.hub.address, PORT), timeout=LIMIT)  # the other's hub has this address too
