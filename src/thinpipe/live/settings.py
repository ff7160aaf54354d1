"""Settings of `thinpipe watch`. No torch here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from thinpipe.core.errors import UserError

PORT = 8080
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Look at a run while it runs, or afterwards, in the terminal or on a local page."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The dump_folder of a run; of a hub's run, that of the hub."""
    once: bool = False
    """Print how it stands and end, for pipes and scripts."""
    dashboard: bool = False
    """Serve a web page instead."""
    host: str = LOOPBACK
    """Where the page is served. Whoever reaches it can read it: there is no login."""
    port: int = PORT
    """Of the page; 0 takes any that is free."""

    def __post_init__(self) -> None:
        if self.once and self.dashboard:
            raise UserError("--once prints and --dashboard serves a page: leave one of them out")
        if not self.dashboard and (self.host, self.port) != (LOOPBACK, PORT):
            raise UserError("--host and --port are where a page is served: give --dashboard, or leave them out")
        if not 0 <= self.port < 65536:
            raise UserError(f"--port must lie between 0 and 65535, not {self.port}")
