"""A hub and homes on an internet of the kernel's own: links with rates, and routers that let nobody in.

    hub                        internet                    router                      PC
    eth0 203.0.113.1 ─ line ─ (benchmarks/netns/lab.py) ─ line ─ eth0 203.0.113.3 ─ nat ─ lan0 ─ eth0 192.168.1.2
                                                       └ line ─ eth0 203.0.113.2 (a PC without a router)

Behind a router all PCs have the same private address, as in most homes. Linux and root only; nothing stays behind.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.netns import lab, namespaces
from benchmarks.netns.namespaces import run

_NETWORK, _PRIVATE_NETWORK = "203.0.113", "192.168.1"
_ROOM = ["-s", "66000", "-B", "131072"]
"""For frames that tcpdump has not read yet: 128 MiB, in places as large as a frame may be. On a busy machine it falls
thousands behind."""
_ROUTER_RULES = """
table ip home {
    chain leaving { type nat hook postrouting priority 100; oifname "eth0" masquerade; }
    chain through { type filter hook forward priority 0; policy drop;
        iifname "lan0" accept; ct state established,related accept; }
    chain into { type filter hook input priority 0; policy drop;
        iifname { "lo", "lan0" } accept; ct state established,related accept; }
}
"""


@dataclass(frozen=True, kw_only=True)
class HomeLink:
    """Rates such as 80mbps, seen from the home; None: as fast as it can. `nat`: behind a router."""

    up: str | None = None
    down: str | None = None
    nat: bool = False


def missing() -> str | None:
    """Why there can be no homes here; None if there can."""
    if (why := lab.missing()) is not None:
        return why
    if shutil.which("nft") is None:
        return "routers need `nft`: apt-get install nftables"
    try:
        with Homes([HomeLink(nat=True)]):
            return None
    except subprocess.CalledProcessError as error:
        return f"this kernel does not let us make a router: {error.stderr.strip()}"


class Place:
    """The hub's machine or a home's PC."""

    def __init__(self, machines: lab.KernelTestbed, index: int, namespace: str) -> None:
        self.namespace, self.address = namespace, machines.address(index)
        """The public address: its own, or its router's."""
        self.link_namespace = machines.namespace(index)
        """Where the link begins: here, or at the router."""
        self._started: list[subprocess.Popen[str]] = []

    def popen(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """A process here. It is killed, with all that it has started here, when the homes close."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command], env={**os.environ, **(env or {})}, text=True, **options
        )
        self._started.append(process)
        return process

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, *, seconds: float = 300, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Waits for its end; an error if it fails or takes longer. Output is kept."""
        return subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command],
            **{"env": {**os.environ, **(env or {})}, "timeout": seconds, "check": True, **options},
            text=True,
            capture_output=True,
        )

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """This thread is here, and what it begins stays here: sockets, threads, processes, a broker."""
        return namespaces.inside(self.namespace)

    def counters(self) -> dict[str, int]:
        """Traffic of its link: bytes, packets and dropped packets, rx_ and tx_."""
        return namespaces.counters(self.link_namespace, "eth0")

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait(timeout=120)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        namespaces.remove(self.namespace)


class Homes:
    """`with Homes([HomeLink(up="20mbps", nat=True)], hub=HomeLink(up="80mbps")) as net: net.homes[0].run([...])`

    `latency` is one way, between any two of them.
    """

    def __init__(self, homes: Sequence[HomeLink], *, hub: HomeLink | None = None, latency: str = "0ms") -> None:
        self._links = [hub or HomeLink(), *homes]
        ups, downs = ([getattr(line, way) for line in self._links] for way in ("up", "down"))
        self._lab = lab.KernelTestbed(len(self._links), up=ups, down=downs, latency=latency, network=_NETWORK)
        self.name = self._lab.name
        self._places = [
            Place(self._lab, index, f"{self.name}-pc{index}" if line.nat else self._lab.namespace(index))
            for index, line in enumerate(self._links)
        ]
        self.hub, *self.homes = self._places

    def __enter__(self) -> Self:
        self._lab.__enter__()
        try:
            for line, place in zip(self._links, self._places, strict=True):
                if line.nat:
                    _add_router(place)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._lab.close)
            for place in self._places:
                stack.callback(place.end)


def _add_router(place: Place) -> None:
    pc, router = place.namespace, place.link_namespace
    run("ip", "netns", "add", pc)
    run(
        *("ip", "-n", pc, "link", "add", "eth0", "gso_max_segs", "1"),
        *("type", "veth", "peer", "name", "lan0", "gso_max_segs", "1", "netns", router),
    )
    for namespace, device, host in ((pc, "eth0", 2), (router, "lan0", 1)):
        run("ip", "-n", namespace, "address", "add", f"{_PRIVATE_NETWORK}.{host}/24", "dev", device)
        run("ip", "-n", namespace, "link", "set", device, "up")
    run("ip", "-n", pc, "link", "set", "lo", "up")
    run("ip", "-n", pc, "route", "add", "default", "via", f"{_PRIVATE_NETWORK}.1")
    run("ip", "netns", "exec", router, "nft", _ROUTER_RULES)
    with namespaces.inside(router):
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


@contextlib.contextmanager
def capture(place: Place, path: Path) -> Iterator[None]:
    """Every frame on its line from now to the end of the block, for tshark to read. Needs tcpdump."""
    options = ["-i", "eth0", "-w", str(path), "-Z", "root", "--immediate-mode", "-U", *_ROOM]
    process = subprocess.Popen(
        ["ip", "netns", "exec", place.link_namespace, "tcpdump", *options], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        first = process.stderr.readline()
        assert "listening on eth0" in first, first + process.stderr.read()
        yield
        _await_all(place, path)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
        assert "\n0 packets dropped by kernel" in said, said
    finally:
        process.kill()
        process.wait(timeout=120)
        process.stderr.close()


def _await_all(place: Place, path: Path) -> None:
    """What tcpdump has not read when it is stopped is lost: so we send a last frame, and wait until that is written."""
    last, deadline = secrets.token_bytes(32), time.monotonic() + 120
    with namespaces.inside(place.link_namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        sender.sendto(last, (f"{_NETWORK}.255", 9))
    with path.open("rb") as file:
        end = b""
        while last not in end:
            assert time.monotonic() < deadline, "tcpdump does not write what passes"
            end = end[-4096:] + file.read()
            time.sleep(0.02)


def frames(path: Path, what: str, *options: str) -> int:
    """How many frames of a capture are so, by tshark."""
    command = ["tshark", "-n", "-r", str(path), *options, "-Y", what, "-T", "fields", "-e", "frame.number"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    return len(found.stdout.split())
