"""Settings of hubs and of those who join them. No torch here: `--help` shows them at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import tyro

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_bytes, parse_rate


@dataclass(frozen=True, kw_only=True)
class HubSection:
    peers: int = 2
    """Begin when so many have joined. More become spares, or take the place of slower ones."""
    everyone: bool = False
    """Give every peer something to compute, even if fewer would be faster, as for small models."""
    address: str | None = None
    """What the others dial: a name or an address of this machine that they can reach. Default: that of its line."""
    host: str = "0.0.0.0"
    """Where to listen. 127.0.0.1: for this machine alone."""
    port: int = 0
    """0: the one of last time, or any free one. Choose one if a router has to forward it."""
    invites: int | None = None
    """Invite lines to print at the start. Default: one for each peer that is wanted and does not belong yet."""
    up: str | None = None
    """The rate of the hub's own line, for example 20mbps. Default: measured by all peers at once."""
    down: str | None = None
    """Likewise. Give both or none."""
    patience_seconds: float = 60.0
    """When somebody is gone, wait so long for as many peers as before, then go on with those who can."""
    lost_after_seconds: float = 10.0
    """A peer of which nothing is heard for so long is lost."""
    progress_factor: float = 4.0
    """A peer that is heard, but has computed for so many times the longest that it ever needed between two messages, is
    lost too. The first steps, and what is no step, may take parallelism.timeout_seconds."""
    progress_floor_seconds: float = 10.0
    """No peer is lost for computing less than so long."""
    server: Path | None = None
    """The nats-server to start. Default: the one that came with thinpipe[swarm], or the one on the PATH."""

    def __post_init__(self) -> None:
        if self.peers < 1:
            raise UserError(f"hub.peers must be at least 1, not {self.peers}")
        if not (self.lost_after_seconds > 0 and self.progress_floor_seconds > 0 and self.progress_factor >= 1):
            raise UserError(
                "hub.lost_after_seconds and hub.progress_floor_seconds must be above 0, hub.progress_factor at least 1"
            )
        if (self.up is None) != (self.down is None):
            raise UserError("give both hub.up and hub.down, or none of them")
        if self.up is not None and self.down is not None:
            parse_rate(self.up), parse_rate(self.down)

    @property
    def bps(self) -> tuple[float, float] | None:
        return None if self.up is None or self.down is None else (parse_rate(self.up), parse_rate(self.down))


@dataclass(frozen=True, kw_only=True)
class JoinConfig:
    """Join a run: with the line that `thinpipe hub` printed, or again with the folder it was joined in."""

    invite: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="INVITE")]
    """The line that begins with thinpipe1:, or a folder."""
    folder: Path | None = None
    """Where our key and our part of the model are kept. Default: joined/<the invite's id>."""
    name: str = ""
    """What the others call us: small letters and digits. Default: one that the hub gives."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    memory: str | None = None
    """Use no more than this, for example 12GB. Default: what is free."""
    patience_seconds: float = 600.0
    """How long to try when the hub cannot be reached."""
    address: str | None = None
    """Dial the hub here instead: for who sits beside it, such as 127.0.0.1 on the hub's own machine."""

    def address_in(self, url: str) -> str:
        """The url to dial."""
        if self.address is None:
            return url
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tls://{host}:{urlsplit(url).port}"

    def __post_init__(self) -> None:
        if self.memory is not None:
            parse_bytes(self.memory)

    @property
    def memory_nbytes(self) -> int | None:
        return None if self.memory is None else int(parse_bytes(self.memory))


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """Who is in a run, what each computes, and what limits it."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The dump_folder of a hub's run, or the folder of one who joined."""
    json: bool = False
    """All numbers, for programs."""


@dataclass(frozen=True, kw_only=True)
class KickConfig:
    """Remove a peer from a run: it is cut off at once and cannot come back without a new invite."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The dump_folder of the hub's run."""
    peer: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PEER")]
    """Its name, as `thinpipe status` shows it."""


@dataclass(frozen=True, kw_only=True)
class InviteConfig:
    """Print one more invite line of a running hub."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The dump_folder of the hub's run."""
