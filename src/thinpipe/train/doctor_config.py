"""Settings of `thinpipe doctor`. No torch here: `--help` shows them at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Look whether this machine can do a run, and reach its hub. Nothing is changed, and no invite is used up."""

    run: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN.toml]")] = None
    """A file with the settings of a run: its data, disk and memory are looked at too."""
    invite: str | None = None
    """The line that begins with thinpipe1:, or the folder of a run that was joined or is hosted here."""
    hub: str | None = None
    """HOST:PORT of a hub, if there is no invite yet."""
    host: bool = False
    """Also what hosting a hub needs; RUN.toml may say which port ([hub] port)."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: bool = False
    """All findings, for programs."""

    def __post_init__(self) -> None:
        if self.hub is not None and self.invite is not None:
            raise UserError("an invite says where the hub is: give --invite or --hub")
        if self.hub is not None:
            self.hub_address()

    def hub_address(self) -> tuple[str, int]:
        host, _, port = (self.hub or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--hub {self.hub!r} is not HOST:PORT: write it like 203.0.113.5:4222")
        return host.strip("[]"), int(port)
