"""Settings of `thinpipe plan`: a run's settings, and the machines to plan for. Imports no torch."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from thinpipe.config.hub import HubConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_count


@dataclass(frozen=True, kw_only=True)
class PlanConfig(HubConfig):
    """Predict memory, speed and cost of a run: thinpipe plan RUN.toml --machines MACHINES.toml."""

    machines: Path | None = None
    """here: this machine, measured now. Or a machines file (example: examples/machines.toml), or the dump_folder of a
    hub's run, to plan for the peers that have joined the run, with their measured speeds."""
    vocab_size: int | None = None
    """Vocabulary size. Default: the vocabulary of data.path if that folder exists, else the preset's."""
    tokens: str | None = None
    """Number of training tokens for which to predict hours and price, for example 10B. Default: the run's own."""
    search: bool = False
    """Search for the boundaries, schedule and micro-batches that are fastest on these machines."""
    json: bool = False
    """Print the plan as JSON."""
    figure: Path | None = None
    """File to draw a timeline of one step into: when each machine computes, sends and waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens is not None:
            parse_count(self.tokens)
        if self.vocab_size is not None and self.vocab_size < 1:
            raise UserError(f"--vocab-size must be at least 1, not {self.vocab_size}")

    def as_run(self) -> RunConfig:
        return RunConfig(**{entry.name: getattr(self, entry.name) for entry in dataclasses.fields(RunConfig)})
