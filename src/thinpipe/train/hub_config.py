"""Settings of `thinpipe hub` and `thinpipe up`: those of a run, and of who takes part. No torch here."""

import dataclasses
from dataclasses import dataclass, field

from thinpipe.core.errors import UserError
from thinpipe.swarm.settings import HubSection
from thinpipe.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class HubConfig(RunConfig):
    """Host a run that others join: prints a line of text to send to each of them."""

    hub: HubSection = field(default_factory=HubSection)

    def as_run(self) -> RunConfig:
        return RunConfig(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(RunConfig)})


@dataclass(frozen=True, kw_only=True)
class UpConfig(RunConfig):
    """Try a run with a hub and peers all on this machine."""

    peers: int = 2
    """Processes that join."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peers < 1:
            raise UserError(f"--peers must be at least 1, not {self.peers}")

    def as_hub(self) -> HubConfig:
        fields = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(RunConfig)}
        return HubConfig(
            **fields, hub=HubSection(peers=self.peers, everyone=True, address="127.0.0.1", host="127.0.0.1")
        )
