"""Table of the command line's verbs. A new verb is an entry here and a function elsewhere.

Settings classes are imported at start, because `--help` shows them, so their modules must not import torch. Functions
are named by strings and imported only when their verb runs.
"""

from dataclasses import dataclass
from typing import Any

from thinpipe.config.commands import (
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    ProbeConfig,
    ReportConfig,
    SelftestConfig,
    WatchConfig,
)
from thinpipe.config.doctor import DoctorConfig
from thinpipe.config.hub import HubConfig, InviteConfig, JoinConfig, KickConfig, ServiceConfig, StatusConfig, UpConfig
from thinpipe.config.plan import PlanConfig
from thinpipe.config.run import RunConfig
from thinpipe.data import TokenizeConfig


@dataclass(frozen=True)
class Verb:
    """A subcommand. `target` is "module:function"; the function takes an instance of `config` and returns an exit code
    or None."""

    config: type[Any]
    target: str
    starts_with_file: bool = False
    """True if the first argument is a TOML file with settings (or the name of a preset), which flags override."""
    swarm: bool = False
    """True if the verb connects to a hub or runs one, which needs the extra `swarm`."""
    check: str = ""
    """As `target`, for what can be refused before the target's imports, which take seconds: raises UserError."""


_MEMORY = "thinpipe.swarm.hub.memory_check"

VERBS: dict[str, Verb] = {
    "tokenize": Verb(TokenizeConfig, "thinpipe.cli.tokenize:run"),
    "plan": Verb(PlanConfig, "thinpipe.cli.plan:run", starts_with_file=True),
    "train": Verb(RunConfig, "thinpipe.cli.train:run", starts_with_file=True),
    "hub": Verb(
        HubConfig, "thinpipe.swarm.hub.command:run", starts_with_file=True, swarm=True, check=f"{_MEMORY}:check_hub"
    ),
    "join": Verb(JoinConfig, "thinpipe.swarm.peer.cards:run", swarm=True),
    "up": Verb(UpConfig, "thinpipe.swarm.local:up", starts_with_file=True, swarm=True, check=f"{_MEMORY}:check_up"),
    "status": Verb(StatusConfig, "thinpipe.cli.hub_commands:status", swarm=True),
    "watch": Verb(WatchConfig, "thinpipe.cli.watch:run"),
    "invite": Verb(InviteConfig, "thinpipe.cli.hub_commands:invite", swarm=True),
    "service": Verb(ServiceConfig, "thinpipe.swarm.service.command:run", swarm=True),
    "kick": Verb(KickConfig, "thinpipe.cli.hub_commands:kick", swarm=True),
    "eval": Verb(EvalConfig, "thinpipe.cli.evaluate:run"),
    "generate": Verb(GenerateConfig, "thinpipe.cli.generate:run"),
    "report": Verb(ReportConfig, "thinpipe.cli.report:run"),
    "doctor": Verb(DoctorConfig, "thinpipe.doctor.command:run"),
    "selftest": Verb(SelftestConfig, "thinpipe.selftest.command:run"),
    "probe": Verb(ProbeConfig, "thinpipe.cli.probe:run"),
    "export": Verb(ExportConfig, "thinpipe.cli.export_model:run"),
    "import": Verb(ImportConfig, "thinpipe.cli.import_model:run"),
}
