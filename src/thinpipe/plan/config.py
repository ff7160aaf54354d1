"""Settings of `thinpipe plan`: those of a run, and of the machines to plan for. No torch here."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_count
from thinpipe.train.config import RunConfig
from thinpipe.train.hub_config import HubConfig


@dataclass(frozen=True, kw_only=True)
class PlanConfig(HubConfig):
    """Will it fit, how fast is it, what does it cost: thinpipe plan RUN.toml --machines MACHINES.toml."""

    machines: Path | None = None
    """A file that says which machines there are (examples/machines.toml), or the folder of a hub's run: then the
    machines are those that have joined it, as they were measured."""
    vocab_size: int | None = None
    """Tokens in the vocabulary. Default: that of data.path if it is there, else the preset's."""
    tokens: str | None = None
    """Say hours and money to so many tokens, for example 10B. Default: those of the run."""
    search: bool = False
    """Look for the cut, schedule and micro-batches that are fastest on these machines."""
    json: bool = False
    """Print everything as JSON."""
    figure: Path | None = None
    """Draw the step as a timeline into this file: who computes, sends and waits when."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None:
            parse_count(self.tokens)
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UserError(f"--vocab-size must be at least 1, not {self.vocab_size}")

    def as_run(self) -> RunConfig:
        return RunConfig(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(RunConfig)})
