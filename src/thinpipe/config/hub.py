"""Settings of the commands hub, join, up, status, kick and invite. Imports no torch, so that `--help` is quick."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import tyro

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_bytes, parse_rate


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    peers: int = 2
    """Number of joined peers at which training starts. Further peers become standbys, or replace slower peers."""
    use_all_peers: bool = False
    """Assign segments to every peer, even if fewer peers would be faster, as for small models."""
    exact: bool = False
    """Keep the run bit for bit what it would be without any loss: a segment stays with the class of device (kind of
    processor or card, threads, torch) that computed it first, and the run waits for one of that class. Cards need
    debug.deterministic. Default: unlike devices may replace each other, and the log says when."""
    address: str | None = None
    """Host name or IP address under which peers reach this machine; part of every invite. Default: the address of the
    network interface with the default route."""
    host: str = "0.0.0.0"
    """Local address to listen on. 127.0.0.1: only peers on this machine."""
    port: int = 0
    """TCP port to listen on. 0: the port of the previous start in this folder, or any free port. Set it if a router has
    to forward the port."""
    invites: int | None = None
    """Number of invites to print at the start. Default: hub.peers minus the peers that already belong to the run."""
    invite_days: float = 7.0
    """Days for which an invite can be used, by the hub's clock."""
    up: str | None = None
    """Rate of the hub's uplink, for example 20mbps. Default: measured, by all peers at the same time. Set both hub.up
    and hub.down, or none of them."""
    down: str | None = None
    """Rate of the hub's downlink, for example 80mbps. Default: measured, as hub.up."""
    patience_seconds: float = 60.0
    """Seconds to wait for a replacement after a peer is lost; then training continues with the remaining peers if the
    model fits on them."""
    heartbeat_timeout_seconds: float = 10.0
    """Seconds without a heartbeat after which a peer is lost."""
    stall_factor: float = 4.0
    """A peer whose heartbeats arrive is lost too when it makes no progress for stall_factor times its longest measured
    time between two actions of a step. The first steps, and loading, saving and validation, may take
    parallelism.timeout_seconds."""
    stall_floor_seconds: float = 10.0
    """Minimum seconds without progress before a peer is considered stalled."""
    keep_ends: tuple[str, ...] = ()
    """Names of your own machines, which alone compute the first and the last segment: of a Hugging Face model no other
    machine then receives token ids or labels. At least two names, since the ends are in two programs; one machine may
    join twice. The hub prints an invite for each name, and nobody else can take it. Default: any machine."""
    audit_share: float = 0.05
    """Share of the time, 0 to 1, in which a process of low priority with one thread computes losses again from commits
    and compares them with what peers report. 0: never."""
    server: Path | None = None
    """Path of the nats-server binary. Default: the binary installed with thinpipe[swarm], or the one on the PATH."""

    def __post_init__(self) -> None:
        if self.peers < 1:
            raise UserError(f"hub.peers must be at least 1, not {self.peers}")
        if not (self.heartbeat_timeout_seconds > 0 and self.stall_floor_seconds > 0 and self.stall_factor >= 1):
            raise UserError(
                "hub.heartbeat_timeout_seconds and hub.stall_floor_seconds must be above 0, hub.stall_factor at least 1"
            )
        if len(self.keep_ends) == 1 or len(set(self.keep_ends)) < len(self.keep_ends):
            raise UserError(
                f"hub.keep_ends {list(self.keep_ends)} must be two names or more: the first and the last segment are "
                "in two programs. For one machine of yours, name two, and join twice there"
            )
        if not 0 <= self.audit_share <= 1:
            raise UserError(f"hub.audit_share must be a share of the time, 0 to 1, not {self.audit_share}")
        if not 0 < self.invite_days <= 3650:
            raise UserError(f"hub.invite_days must be above 0 and at most 3650, not {self.invite_days}")
        if (self.up is None) != (self.down is None):
            raise UserError("set both hub.up and hub.down, or none of them")
        if self.up is not None and self.down is not None:
            parse_rate(self.up), parse_rate(self.down)

    @property
    def bps(self) -> tuple[float, float] | None:
        return None if self.up is None or self.down is None else (parse_rate(self.up), parse_rate(self.down))


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """Join a run as a peer: with an invite printed by `thinpipe hub`, or with the folder of an earlier join."""

    invite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INVITE")]
    """Invite (a line that starts with thinpipe3:), or the folder of an earlier join to rejoin its run."""
    more: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MORE ...]")] = ()
    """Further invites, or folders, for a machine with several cards: one for each card, which becomes a peer of its
    own."""
    folder: Path | None = None
    """Folder for this peer's key and its part of the model; with several invites, for a folder of each: 0, 1, ...
    Default: joined/<the invite's id>."""
    name: str = ""
    """Name of this peer in the run: lower-case letters and digits; with several invites, NAME1, NAME2, ... Default:
    chosen by the hub."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:N or mps."""
    memory: str | None = None
    """Maximum memory to use, for example 12GB. Default: the free memory."""
    reconnect_timeout_seconds: float = 600.0
    """Seconds to keep trying to connect while the hub cannot be reached; then the program ends with exit code 1."""
    base: Path | None = None
    """For a run on a Hugging Face model: folder on this machine with the model's files, or those with this machine's
    layers. What is not there comes from the Hugging Face hub, if the run names a model of it, or from our hub. Every
    tensor is compared with the hash that our hub states."""
    address: str | None = None
    """Address at which to connect to the hub, in place of the invite's: for example 127.0.0.1 on the hub's own
    machine, or its address in the local network."""

    def address_in(self, url: str) -> str:
        """The URL to connect to: the invite's `url` with its host replaced by `address`, if that is set."""
        if self.address is None:
            return url
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tls://{host}:{urlsplit(url).port}"

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_bytes(self.memory)

    def arguments(self, invite: str, device: str, index: int) -> list[str]:
        """Arguments of a `thinpipe join` of the card `index`, counted from 0, with this invite."""
        flags = {
            "--folder": None if self.folder is None else self.folder / str(index),
            "--name": f"{self.name}{index + 1}" if self.name else None,
            "--device": device,
            "--memory": self.memory,
            "--reconnect-timeout-seconds": self.reconnect_timeout_seconds,
            "--base": self.base,
            "--address": self.address,
        }
        return [invite, *(str(part) for flag in flags.items() if flag[1] is not None for part in flag)]

    @property
    def memory_nbytes(self) -> int | None:
        return None if self.memory is None else int(parse_bytes(self.memory))


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Show the peers of a run, the segments that each one computes, and the bottleneck."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The dump_folder of the hub's run, or a peer's folder (`thinpipe join`)."""
    json: bool = False
    """Print the status as JSON."""


@dataclass(frozen=True, kw_only=True)
class KickConfig:
    """Remove a peer from a run: the peer is disconnected at once and cannot rejoin without a new invite."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The dump_folder of the hub's run."""
    peer: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PEER")]
    """Name of the peer, as shown by `thinpipe status`."""


@dataclass(frozen=True, kw_only=True)
class InviteConfig:
    """Print one more invite of a running hub, or list or revoke its open invites."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The dump_folder of the hub's run."""
    list: bool = False
    """List the invites that nobody has used, with how long they can be, in place of printing a new one."""
    revoke: str = ""
    """Id of an open invite, as --list shows it: it can no longer be used."""

    def __post_init__(self) -> None:
        if self.list and self.revoke:
            raise UserError("--list and --revoke are two commands: use one after the other")


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Have a hub or a joined machine come back after a reboot: install, remove or show its service, by systemd, launchd
    or the Windows Task Scheduler. Start the hub, or join, once by hand before."""

    action: Annotated[Literal["install", "remove", "status"], tyro.conf.Positional, tyro.conf.arg(metavar="ACTION")]
    """install, remove or status."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The dump_folder of the hub's run, or a peer's folder (`thinpipe join`)."""
    device: str = "auto"
    """For a peer: as for `thinpipe join`."""
    memory: str | None = None
    """For a peer: as for `thinpipe join`."""
    base: Path | None = None
    """For a peer: as for `thinpipe join`."""
    address: str | None = None
    """For a peer: as for `thinpipe join`."""

    @property
    def lends_something(self) -> bool:
        """True if an option of a peer is given."""
        return (self.device, self.memory, self.base, self.address) != ("auto", None, None, None)


@dataclass(frozen=True, kw_only=True)
class HubConfig(RunConfig):
    """Host a run for peers on other machines: prints an invite to send to each of them (see `thinpipe join`)."""

    hub: HubSettings = field(default_factory=HubSettings)

    def as_run(self) -> RunConfig:
        return RunConfig(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(RunConfig)})


@dataclass(frozen=True, kw_only=True)
class UpConfig(RunConfig):
    """Try out a hub run on this machine: starts a hub and its peers."""

    peers: int = 2
    """Number of peer processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peers < 1:
            raise UserError(f"--peers must be at least 1, not {self.peers}")

    def as_hub(self) -> HubConfig:
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(RunConfig)}
        return HubConfig(
            **fields, hub=HubSettings(peers=self.peers, use_all_peers=True, address="127.0.0.1", host="127.0.0.1")
        )
