"""`thinpipe up`: a hub and its peers on one machine, each peer in its own process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinpipe.config.hub import UpConfig
from thinpipe.config.huggingface_model import HUB_PREFIX
from thinpipe.core.process_group import NEW_PROCESS_GROUP
from thinpipe.core.program_output import plain_console
from thinpipe.core.run_folder import IDENTITY
from thinpipe.swarm.hub.command import POLL_SECONDS, host
from thinpipe.swarm.hub.server import Hub
from thinpipe.swarm.protocol.messages import EXIT_TEMPFAIL

_LEAVE_SECONDS = 20.0
"""Seconds for all peers to leave after the run has ended; then they are killed."""


def up(config: UpConfig) -> int:
    """Hosts a run and starts its peers as processes. Exit code as for `thinpipe hub`."""
    console, peers = plain_console(), list[LocalPeer]()
    hub_config, folder = config.as_hub(), config.job.dump_folder / "peers"
    hf = config.model.hf
    base = None if hf is None or hf.startswith(HUB_PREFIX) else hf
    watchers = list[asyncio.Task[None]]()
    with _stop_peers_on_exit(peers):

        async def start_peers(hub: Hub) -> None:
            for index in range(config.peers):
                name = f"p{index}"
                home = folder / name
                invite = str(home) if (home / IDENTITY).exists() else (await hub.admission.invite()).line()
                threads = max(1, (os.cpu_count() or 1) // config.peers)
                peers.append(_join(invite, home, name, config.training.device, threads=threads, base=base))
            console.print(
                f"started {config.peers} peers, whose output is in {folder}/*/output.log; `thinpipe status "
                f"{config.job.dump_folder}` shows their state"
            )
            watchers.append(asyncio.create_task(_watch_peers(peers, hub, console.print)))

        return host(hub_config, console, start_peers)


@dataclass(frozen=True)
class LocalPeer:
    """A peer process started by `up`."""

    name: str
    process: "subprocess.Popen[bytes]"
    log: Path
    earlier_nbytes: int
    """Size of the log in bytes when this process started: output of earlier processes."""

    @property
    def has_failed(self) -> bool:
        return self.process.poll() not in (None, 0, EXIT_TEMPFAIL)

    def last_output(self) -> str:
        """The last line that the process printed, or the signal that ended it."""
        code = self.process.returncode
        if code < 0:
            return f"ended by {signal.Signals(-code).name}"
        words = self.log.read_bytes()[self.earlier_nbytes :].decode(errors="replace").split("\n")
        return next((line for line in reversed(words) if line.strip()), f"exit code {code}")


async def _watch_peers(peers: Sequence[LocalPeer], hub: Hub, print_line: Callable[[str], None]) -> None:
    """Prints why a peer failed. Stops the hub, which would wait for ever, when no peer is left."""
    reported = set[str]()
    while hub.membership.present or any(peer.process.poll() is None for peer in peers):
        await asyncio.sleep(POLL_SECONDS)
        for peer in peers:
            if peer.name not in reported and peer.has_failed:
                reported.add(peer.name)
                with contextlib.suppress(OSError):
                    print_line(f"{peer.name} has failed: {peer.last_output()} (all of its output: {peer.log})")
    if not hub.generations.ended:
        hub.stop("stopped: all peers have ended before the run was finished")


def _join(invite: str, folder: Path, name: str, device: str, *, threads: int, base: str | None) -> LocalPeer:
    """`base`: folder of the run's base, which is on this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "thinpipe", "join", invite, "--device", device]
    if not invite.startswith(str(folder)):
        command += ["--folder", str(folder), "--name", name]
    if base is not None:
        command += ["--base", base]
    log = folder / "output.log"
    with log.open("ab") as output:
        earlier_nbytes = log.stat().st_size
        process = subprocess.Popen(
            command,
            env={"OMP_NUM_THREADS": str(threads), **os.environ},
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl+C reaches only this process; its hub asks the peers to stop
            creationflags=NEW_PROCESS_GROUP,
        )
    return LocalPeer(name, process, log, earlier_nbytes)


@contextlib.contextmanager
def _stop_peers_on_exit(peers: Sequence[LocalPeer]) -> Iterator[None]:
    """On exit waits until the peers have left, which they do by themselves when the run has ended; kills the rest."""
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
