"""`thinpipe hub` starts the broker, prints invites and hosts the run until it has ended; `thinpipe up` joins it too."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from thinpipe.swarm.broker import Broker
from thinpipe.swarm.epochs import HubSettings
from thinpipe.swarm.hub import Hub
from thinpipe.train.alone import alone_in
from thinpipe.train.console import open_display
from thinpipe.train.hosting import HostedRun
from thinpipe.train.hub_config import HubConfig, UpConfig
from thinpipe.train.join import COME_BACK
from thinpipe.train.room import wait_for_room
from thinpipe.train.stopping import StopRequest

_LEAVE_SECONDS, _LOOK_SECONDS = 20.0, 0.1
"""What the hub's own small files need many times over, and how often it looks whether it is there."""
_IN_USE_BY = "another hub, or by a `thinpipe train`: stop that one first, or choose another folder"
Begin = Callable[[Hub], Awaitable[None]]


def run(config: HubConfig) -> int:
    """Exit code 0 when the run has finished or was asked to stop."""
    console = _console()

    async def print_invites(hub: Hub) -> None:
        console.print(f"hub of run {hub.settings.run} at {hub.settings.public_url}")
        missing = config.hub.peers - len(hub.broker.peers) if config.hub.invites is None else config.hub.invites
        for _ in range(missing):
            console.print(
                f"\nsend this line to one person, as you would a password:\n{(await hub.gate.invite()).line()}"
            )
        console.print(f"\nanother invite: thinpipe invite {config.job.dump_folder}")

    return _host(config, console, print_invites)


def up(config: UpConfig) -> int:
    """The peers are processes of their own, which write into the run's folder."""
    console, peers = _console(), list[LocalPeer]()
    hub_config, folder = config.as_hub(), config.job.dump_folder / "peers"
    watchers = list[asyncio.Task[None]]()
    with _ending(peers):

        async def start_peers(hub: Hub) -> None:
            for index in range(config.peers):
                home = folder / str(index)
                invite = str(home) if (home / "identity.toml").exists() else (await hub.gate.invite()).line()
                peers.append(_join(invite, home, threads=max(1, (os.cpu_count() or 1) // config.peers)))
            console.print(
                f"{config.peers} peers, which write into {folder}/*/output.log; thinpipe status "
                f"{config.job.dump_folder} shows them"
            )
            watchers.append(asyncio.create_task(_watch_peers(peers, hub, console.print)))

        return _host(hub_config, console, start_peers)


@dataclass(frozen=True)
class LocalPeer:
    """A peer that `up` has started."""

    process: "subprocess.Popen[bytes]"
    log: Path
    earlier_nbytes: int
    """What is in the log of its lives before."""

    @property
    def has_failed(self) -> bool:
        return self.process.poll() not in (None, 0, COME_BACK)

    def last_words(self) -> str:
        code = self.process.returncode
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        words = self.log.read_bytes()[self.earlier_nbytes :].decode(errors="replace").split("\n")
        return next((line for line in reversed(words) if line.strip()), f"exit code {code}")


async def _watch_peers(peers: Sequence[LocalPeer], hub: Hub, tell: Callable[[str], None]) -> None:
    """Says what became of those that fail, and stops the hub, which would wait for ever, when nobody is left."""
    told = set[int]()
    while hub.roster.present or any(peer.process.poll() is None for peer in peers):
        await asyncio.sleep(_LOOK_SECONDS)
        for index, peer in enumerate(peers):
            if index not in told and peer.has_failed:
                told.add(index)
                with contextlib.suppress(OSError):
                    tell(f"peer {index} has failed: {peer.last_words()} (all it printed: {peer.log})")
    if not hub.epochs.ended:
        hub.stop("all peers have ended, and the run has not")


def _host(config: HubConfig, console: Console, begin: Begin) -> int:
    section, folder = config.hub, config.job.dump_folder
    wait_for_room(folder, console.print, who="the hub")
    with (
        alone_in(folder, _IN_USE_BY),
        Broker(folder / "hub", host=section.host, port=section.port, executable=section.server) as broker,
        open_display(config) as display,
        contextlib.closing(HostedRun(config.as_run(), display, everyone=section.everyone)) as hosted,
    ):
        settings = HubSettings(
            run=folder.name,
            public_url=f"tls://{_in_url(section.address or own_address())}:{broker.port}",
            peers=section.peers,
            hub_bps=section.bps,
            patience_seconds=section.patience_seconds,
            lost_after_seconds=section.lost_after_seconds,
            progress_factor=section.progress_factor,
            progress_floor_seconds=section.progress_floor_seconds,
            start_seconds=config.parallelism.timeout_seconds,
        )
        hub = Hub(broker, hosted, settings, console.print)
        reason = asyncio.run(_run(hub, begin))
    console.print(reason)
    return 0 if reason.startswith(("finished", "stopped by")) else 1


async def _run(hub: Hub, begin: Begin) -> str:
    """The first signal asks the peers to save and stop, a second one ends the program."""
    with StopRequest() as request:  # asyncio's own signal handlers do not exist on Windows
        watcher = asyncio.create_task(_pass_on(request, hub))
        try:
            return await hub.run(begin)
        finally:
            watcher.cancel()


async def _pass_on(request: StopRequest, hub: Hub) -> None:
    while not request.requested:
        await asyncio.sleep(_LOOK_SECONDS)
    hub.stop()


def own_address() -> str:
    """Of the line by which this machine reaches the world; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    return address


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _join(invite: str, folder: Path, *, threads: int) -> LocalPeer:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "thinpipe", "join", invite]
    if not invite.startswith(str(folder)):
        command += ["--folder", str(folder)]
    log = folder / "output.log"
    with log.open("ab") as output:
        earlier_nbytes = log.stat().st_size
        process = subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl+C reaches this process alone, whose hub passes it on
        )
    return LocalPeer(process, log, earlier_nbytes)


@contextlib.contextmanager
def _ending(peers: Sequence[LocalPeer]) -> Iterator[None]:
    """Peers leave by themselves when the run has ended, all at once."""
    try:
        yield
    finally:
        deadline = time.monotonic() + _LEAVE_SECONDS
        for process in (peer.process for peer in peers):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False)
