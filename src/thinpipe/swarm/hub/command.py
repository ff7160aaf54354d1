"""`thinpipe hub`: starts the broker, prints invites and hosts the run until it has ended."""

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

from rich.console import Console

from thinpipe.config.hub import HubConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.disk_space import wait_for_disk_space
from thinpipe.core.files import write_atomically
from thinpipe.core.folder_lock import run_lock
from thinpipe.core.program_output import log_to_file, plain_console
from thinpipe.core.run_folder import hub_start_path
from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.hub.address_advice import who_can_reach
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.server import Hub
from thinpipe.swarm.hub.training_host import TrainingHost
from thinpipe.swarm.protocol.invite_text import invite_text
from thinpipe.training.console import Display, open_display
from thinpipe.training.graceful_shutdown import StopRequest

POLL_SECONDS = 0.1
_IN_USE_BY = "another hub, or by a `thinpipe train`: stop that process first, or choose another folder"
Begin = Callable[[Hub], Awaitable[None]]


def run(config: HubConfig) -> int:
    """Exit code 0 when the run has finished or was asked to stop, else 1."""
    console = plain_console()

    async def print_invites(hub: Hub) -> None:
        write_atomically(hub_start_path(config.job.dump_folder), dump_toml(config).encode(), mode=0o600)
        console.print(f"hub of run {hub.settings.run} at {hub.settings.public_url}")
        address = config.hub.address or own_address()
        for line in who_can_reach(address, config.hub.host, hub.broker.port, is_chosen=bool(config.hub.port)):
            console.print(line)
        missing = config.hub.peers - len(hub.broker.peers) if config.hub.invites is None else config.hub.invites
        own = [name for name in config.hub.keep_ends if name not in hub.broker.peers]
        for name in own:
            invite = await hub.admission.invite(for_name=name)
            console.print(f"\nuse this invite on your own machine {name}, and send it to nobody:\n{invite.line()}")
        for number in range(1, missing - len(own) + 1):
            title = f"invite {number} of {missing - len(own)}"
            console.print(f"\n{invite_text(await hub.admission.invite(), title)}")
        console.print(f"\n{hub.run_host.who_reads}")
        folder = config.job.dump_folder
        console.print(f"\nanother invite: thinpipe invite {folder}; those that nobody has used: --list")

    return host(config, console, print_invites)


def host(config: HubConfig, console: Console, begin: Begin) -> int:
    """Runs broker and hub until the run has ended; returns the exit code. `begin` is called when peers can reach the
    hub."""
    hub_settings, folder = config.hub, config.job.dump_folder
    wait_for_disk_space(folder, console.print, who="the hub")
    with (
        run_lock(folder, _IN_USE_BY, private=True),
        Broker(
            folder / "hub", host=hub_settings.host, port=hub_settings.port, executable=hub_settings.server
        ) as broker,
        log_to_file(broker.folder / "hub.log"),
        open_display(config, console=console) as display,
        contextlib.closing(
            TrainingHost(
                config.as_run(),
                display,
                use_all_peers=hub_settings.use_all_peers,
                audit_share=hub_settings.audit_share,
                keep_ends=hub_settings.keep_ends,
            )
        ) as run_host,
    ):
        settings = HubOptions(
            run=folder.name,
            public_url=f"tls://{_in_url(hub_settings.address or own_address())}:{broker.port}",
            peers=hub_settings.peers,
            hub_bps=hub_settings.bps,
            keep_ends=hub_settings.keep_ends,
            exact=hub_settings.exact,
            invite_seconds=86400 * hub_settings.invite_days,
            patience_seconds=hub_settings.patience_seconds,
            heartbeat_timeout_seconds=hub_settings.heartbeat_timeout_seconds,
            stall_factor=hub_settings.stall_factor,
            stall_floor_seconds=hub_settings.stall_floor_seconds,
            startup_seconds=config.parallelism.timeout_seconds,
        )
        hub = Hub(broker, run_host, settings, console.print)
        reason = asyncio.run(_run(hub, begin, display))
        succeeded = hub.succeeded
    console.print(reason)
    return 0 if succeeded else 1


async def _run(hub: Hub, begin: Begin, display: Display) -> str:
    """Runs the hub. The first signal asks the peers to save and stop; a second one ends the process."""

    def on_first() -> None:
        display.say(
            "asking all peers to save and stop; the same command goes on from there. Ctrl+C again ends the hub at once"
        )

    def lost() -> str:
        return (
            f"ended without waiting for the peers: the same command goes on from step {hub.run_host.committed}, the "
            "newest that the hub has in full"
        )

    with StopRequest(on_first, lost) as request:  # asyncio's own signal handlers do not exist on Windows
        watcher = asyncio.create_task(_forward_stop(request, hub))
        try:
            return await hub.run(begin)
        finally:
            watcher.cancel()


async def _forward_stop(request: StopRequest, hub: Hub) -> None:
    while not request.requested:
        await asyncio.sleep(POLL_SECONDS)
    hub.stop()


def own_address() -> str:
    """Address of the network interface with this machine's default route; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address: str = probe.getsockname()[0]
        except OSError:
            address = "127.0.0.1"
    return address


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
