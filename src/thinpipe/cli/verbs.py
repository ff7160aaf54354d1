"""Every verb of the command line in one literal table; adding one is a line here and a file elsewhere.

The settings are imported at once, because `--help` shows them, so the modules they live in must not import torch.
The function is named by text and imported only when its verb runs.
"""

from dataclasses import dataclass
from typing import Any

from thinpipe.bench.chaos_config import ChaosConfig
from thinpipe.bench.links_config import LinksConfig
from thinpipe.bench.step_config import StepConfig
from thinpipe.cli.settings import EvalConfig, ExportConfig, GenerateConfig, ImportConfig, ReportConfig
from thinpipe.data import PrepareConfig
from thinpipe.live.settings import WatchConfig
from thinpipe.plan.config import PlanConfig
from thinpipe.swarm.settings import InviteConfig, JoinConfig, KickConfig, StatusConfig
from thinpipe.train.config import RunConfig
from thinpipe.train.doctor_config import DoctorConfig
from thinpipe.train.hub_config import HubConfig, UpConfig


@dataclass(frozen=True)
class Verb:
    """`target` is "module:function"; the function takes one argument, a `config`."""

    config: type[Any]
    target: str
    starts_with_file: bool = False
    """The first argument is a TOML file with the settings, and flags override it."""
    swarm: bool = False
    """It talks to a hub, or is one: the extra `swarm` has what that needs."""


VERBS: dict[str, Verb] = {
    "tokenize": Verb(PrepareConfig, "thinpipe.cli.tokenize:run"),
    "plan": Verb(PlanConfig, "thinpipe.cli.plan:run", starts_with_file=True),
    "train": Verb(RunConfig, "thinpipe.train.launch:run", starts_with_file=True),
    "hub": Verb(HubConfig, "thinpipe.train.hub:run", starts_with_file=True, swarm=True),
    "join": Verb(JoinConfig, "thinpipe.train.join:run", swarm=True),
    "up": Verb(UpConfig, "thinpipe.train.hub:up", starts_with_file=True, swarm=True),
    "status": Verb(StatusConfig, "thinpipe.cli.swarm:status", swarm=True),
    "watch": Verb(WatchConfig, "thinpipe.live.watch:run"),
    "invite": Verb(InviteConfig, "thinpipe.cli.swarm:invite", swarm=True),
    "kick": Verb(KickConfig, "thinpipe.cli.swarm:kick", swarm=True),
    "eval": Verb(EvalConfig, "thinpipe.cli.evaluate:run"),
    "generate": Verb(GenerateConfig, "thinpipe.cli.generate:run"),
    "report": Verb(ReportConfig, "thinpipe.cli.report:run"),
    "doctor": Verb(DoctorConfig, "thinpipe.train.doctor:run"),
    "export": Verb(ExportConfig, "thinpipe.cli.export:run"),
    "import": Verb(ImportConfig, "thinpipe.cli.import_:run"),
    "bench step": Verb(StepConfig, "thinpipe.bench.step:run"),
    "bench links": Verb(LinksConfig, "thinpipe.bench.links:run"),
    "bench chaos": Verb(ChaosConfig, "thinpipe.bench.chaos:run", swarm=True),
}

GROUPS: dict[str, str] = {
    "bench": "Measure thinpipe on your own machine.",
}
"""What the first word of a two-word verb stands for."""
