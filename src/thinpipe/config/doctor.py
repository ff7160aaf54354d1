"""Settings of `thinpipe doctor`. Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check whether this machine can train a run and reach its hub. Changes nothing and does not use up an invite."""

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN.toml]")] = None
    """Settings file of a run. If given, the run's data, disk space and memory are checked too."""
    invite: str | None = None
    """Invite (a line that starts with thinpipe3:), or the folder of a run that this machine has joined or hosts."""
    hub: str | None = None
    """HOST:PORT of a hub, when there is no invite yet."""
    host: bool = False
    """Also check what hosting a hub needs. The port is taken from RUN.toml ([hub] port), if given."""
    device: str = "auto"
    """Device to check: auto, cpu, cuda, cuda:N or mps."""
    json: bool = False
    """Print the results as JSON."""

    def __post_init__(self) -> None:
        if self.hub is not None and self.invite is not None:
            raise UserError("an invite has the address of its hub: pass --invite or --hub, not both")
        if self.hub is not None:
            self.hub_address()

    def hub_address(self) -> tuple[str, int]:
        """Host and port of `hub`. Raises UserError if `hub` is not HOST:PORT."""
        host, _, port = (self.hub or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--hub {self.hub!r} is not HOST:PORT: write it like 203.0.113.5:4222")
        return host.strip("[]"), int(port)
