"""Machines on home links, made by the kernel: the truth that the shaper is held against. Linux and root only.

    machine 0                       switch                        machine 1
    eth0 ── tbf up ──▶  port0 ─┬─ bridge0 ─ tap0 ─┐
         ◀── tbf down ─ port0 ─┘                  ├─ relay (holds frames for the latency) ─ tap1 ─ bridge1 ─ port1 ...
                                                  │

Each machine is a network namespace with one interface, `eth0`, at 10.77.0.(1 + index). Without a latency, all ports
sit on one bridge and nothing runs but the kernel. Frames are cut to 1514 bytes by the sender, as on a real wire.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.netns import namespaces
from benchmarks.netns.namespaces import run
from thinpipe.core.units import parse_duration, parse_rate

_PREFIX = "thinpipe-lab"
_BURST_NBYTES = 10 * 1514
"""What the token bucket lets through at once: large enough for its timer, small against any message."""
_QUEUE_S = 0.25
"""Of traffic that a modem holds before it drops frames."""
_serial = itertools.count()
Rates = str | None | Sequence[str | None]
"""Of every machine alike, or one by one. None: as fast as it can."""


def missing() -> str | None:
    """Why there can be no lab here; None if there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need `ip` and `tc`: apt-get install iproute2"
    if not Path("/dev/net/tun").exists():
        return "delays need /dev/net/tun"
    name = f"{_PREFIX}-{os.getpid()}-probe"
    try:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", "port0")
        run("ip", "netns", "exec", name, "tc", *_bucket("eth0", "1mbps"))
    except subprocess.CalledProcessError as error:
        return f"this kernel does not let us make network namespaces with token buckets: {error.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


class KernelTestbed:
    """`with KernelTestbed(2, up="80mbps", down="80mbps", latency="20ms") as lab: lab.popen(0, [...])`; latency is
    that of one direction."""

    def __init__(
        self, count: int, *, up: Rates = None, down: Rates = None, latency: str = "0ms", network: str = "10.77.0"
    ) -> None:
        self.count, self.network = count, network
        self.up, self.down = (
            [rates] * count if rates is None or isinstance(rates, str) else rates for rates in (up, down)
        )
        self.latency_s = parse_duration(latency)
        self.name = f"{_PREFIX}-{os.getpid()}-{next(_serial)}"
        self._switch = f"{self.name}-switch"
        self._processes: list[subprocess.Popen[str]] = []
        self._relay: subprocess.Popen[str] | None = None
        self.relay_report = ""

    def address(self, index: int) -> str:
        return f"{self.network}.{1 + index}"

    def popen(
        self, index: int, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Starts a process on a machine; it is killed, if it still runs, when the lab closes."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(index), *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **(environment or {})},
            text=True,
            **options,
        )
        self._processes.append(process)
        return process

    def counters(self, index: int) -> dict[str, int]:
        """Bytes and packets that a machine's interface has sent (tx) and received (rx), Ethernet headers included."""
        return namespaces.counters(self.namespace(index), "eth0")

    def __enter__(self) -> Self:
        _sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait(timeout=5)
        if self._relay is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.relay_report = self._relay.communicate(timeout=5)[0].strip()
            self._relay.kill()
            self._relay.wait(timeout=5)
        for name in (self._switch, *map(self.namespace, range(self.count))):
            namespaces.remove(name)

    def namespace(self, index: int) -> str:
        return f"{self.name}-{index}"

    def _build(self) -> None:
        run("ip", "netns", "add", self._switch)
        if self.latency_s:
            self._start_relay()
        else:
            self._add_bridge("bridge0")
        for index in range(self.count):
            self._add_machine(index)
        for index in range(self.count):
            for other in set(range(self.count)) - {index}:
                # Known in advance, so that no broadcast has to be relayed.
                run(
                    *("ip", "-n", self.namespace(index), "neigh", "add", self.address(other)),
                    *("lladdr", _hardware(other), "dev", "eth0", "nud", "permanent"),
                )

    def _add_machine(self, index: int) -> None:
        machine, port = self.namespace(index), f"port{index}"
        run("ip", "netns", "add", machine)
        run(
            *("ip", "-n", machine, "link", "add", "eth0", "address", _hardware(index), "gso_max_segs", "1"),
            *("type", "veth", "peer", "name", port, "gso_max_segs", "1", "netns", self._switch),
        )
        run("ip", "-n", machine, "address", "add", f"{self.address(index)}/24", "dev", "eth0")
        bridge = f"bridge{index if self.latency_s else 0}"
        if self.latency_s:
            self._add_bridge(bridge)
            run("ip", "-n", self._switch, "link", "set", f"tap{index}", "master", bridge, "up")
        run("ip", "-n", self._switch, "link", "set", port, "master", bridge, "up")
        for namespace, device, rate in ((machine, "eth0", self.up[index]), (self._switch, port, self.down[index])):
            if rate is not None:
                run("ip", "netns", "exec", namespace, "tc", *_bucket(device, rate))
        for device in ("lo", "eth0"):
            run("ip", "-n", machine, "link", "set", device, "up")

    def _add_bridge(self, name: str) -> None:
        run("ip", "-n", self._switch, "link", "add", name, "type", "bridge", "mcast_snooping", "0")
        run("ip", "-n", self._switch, "link", "set", name, "up")

    def _start_relay(self) -> None:
        relay = str(Path(__file__).with_name("relay.py"))
        taps = [f"tap{index}" for index in range(self.count)]
        self._relay = subprocess.Popen(
            ["ip", "netns", "exec", self._switch, sys.executable, "-S", relay, str(self.latency_s), *taps],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._relay.stdout is not None
        assert self._relay.stdout.readline() == "ready\n"


def _bucket(device: str, rate: str) -> list[str]:
    bits = parse_rate(rate)
    queue_nbytes = max(int(bits / 8 * _QUEUE_S), 256 * 1024)
    size = [f"{bits:.0f}bit", "burst", f"{_BURST_NBYTES}b", "limit", f"{queue_nbytes}b"]
    return ["qdisc", "add", "dev", device, "root", "tbf", "rate", *size]


def _hardware(index: int) -> str:
    return f"02:00:00:00:00:{index:02x}"


def _sweep() -> None:
    """Removes what a lab left behind whose process was killed."""
    for line in run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(f"{_PREFIX}-"):
            owner = name.removeprefix(f"{_PREFIX}-").split("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
