"""Table of the command line's verbs. A new verb is an entry here and a function elsewhere.

Settings classes are imported at start, because `--help` shows them, so their modules must not import torch. Functions
are named by strings and imported only when their verb runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from thinpipe.config.commands import (
    CompletionConfig,
    DemoConfig,
    EvalConfig,
    ExportConfig,
    GenerateConfig,
    ImportConfig,
    NewConfig,
    ProbeConfig,
    ReportConfig,
    SelftestConfig,
    WatchConfig,
)
from thinpipe.config.data import TokenizeConfig
from thinpipe.config.doctor import DoctorConfig
from thinpipe.config.hub import HubConfig, InviteConfig, JoinConfig, KickConfig, ServiceConfig, StatusConfig, UpConfig
from thinpipe.config.plan import PlanConfig
from thinpipe.config.run import RunConfig


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
    reads_run: bool = False
    """True if the setting `run` names a folder that must be there."""
    check: str = ""
    """As `target`, for what can be said and refused before the target's imports, which take seconds: raises
    UserError."""
    usual: Mapping[str, str] = field(default_factory=dict)
    """With a file: the flags that `--help` shows, in a few words each; `--help-all` shows all."""


_BEFORE = "thinpipe.doctor.before_start"
_MODEL = {
    "model.preset": "new model of this size",
    "model.hf": "Hugging Face model to tune instead",
    "model.boundaries": "blocks to cut the model at",
}
_BATCH = {
    "training.steps": "optimiser steps in all",
    "training.global-batch-size": "sequences per step",
    "training.seq-len": "tokens per sequence",
}
_RUN = {
    "data.path": "folder of tokens",
    "job.dump-folder": "output folder",
    **_MODEL,
    **_BATCH,
    "optimizer.lr": "learning rate",
}
_DEVICE = {"training.device": "cpu, cuda, cuda:N or mps"}
_TRAIN = {**_RUN, **_DEVICE, "parallelism.pipeline-parallel-degree": "processes on this machine"}
_HUB = {
    "hub.peers": "peers at which training starts",
    "hub.address": "this machine, as peers reach it",
    "hub.port": "port that the router forwards",
    "hub.keep-ends": "your machines, which alone see text",
    **_RUN,
}
_PLAN = {
    "machines": "here, a machines file, or a hub's folder",
    "search": "find the fastest settings",
    "tokens": "for example 10B: hours and price",
    "figure": "file for a timeline of one step",
    "json": "print the plan as JSON",
    **_MODEL,
    **_BATCH,
}
_UP = {"peers": "peer processes", **_RUN, **_DEVICE}

VERBS: dict[str, Verb] = {
    "demo": Verb(DemoConfig, "thinpipe.cli.demo:run", swarm=True),
    "new": Verb(NewConfig, "thinpipe.cli.new:run"),
    "tokenize": Verb(TokenizeConfig, "thinpipe.cli.tokenize:run"),
    "plan": Verb(PlanConfig, "thinpipe.cli.plan:run", starts_with_file=True, usual=_PLAN),
    "train": Verb(RunConfig, "thinpipe.cli.train:run", starts_with_file=True, check=f"{_BEFORE}:train", usual=_TRAIN),
    "hub": Verb(
        HubConfig,
        "thinpipe.swarm.hub.command:run",
        starts_with_file=True,
        swarm=True,
        check=f"{_BEFORE}:hub",
        usual=_HUB,
    ),
    "join": Verb(JoinConfig, "thinpipe.swarm.peer.cards:run", swarm=True, check=f"{_BEFORE}:join"),
    "up": Verb(
        UpConfig,
        "thinpipe.swarm.local:up",
        starts_with_file=True,
        swarm=True,
        check=f"{_BEFORE}:up",
        usual=_UP,
    ),
    "status": Verb(StatusConfig, "thinpipe.cli.hub_commands:status", swarm=True),
    "watch": Verb(WatchConfig, "thinpipe.cli.watch:run"),
    "invite": Verb(InviteConfig, "thinpipe.cli.hub_commands:invite", swarm=True),
    "service": Verb(ServiceConfig, "thinpipe.swarm.service.command:run", swarm=True),
    "kick": Verb(KickConfig, "thinpipe.cli.hub_commands:kick", swarm=True),
    "eval": Verb(EvalConfig, "thinpipe.cli.evaluate:run", reads_run=True),
    "generate": Verb(GenerateConfig, "thinpipe.cli.generate:run", reads_run=True),
    "report": Verb(ReportConfig, "thinpipe.cli.report:run", reads_run=True),
    "doctor": Verb(DoctorConfig, "thinpipe.doctor.command:run"),
    "selftest": Verb(SelftestConfig, "thinpipe.selftest.command:run"),
    "probe": Verb(ProbeConfig, "thinpipe.cli.probe:run"),
    "export": Verb(ExportConfig, "thinpipe.cli.export_model:run", reads_run=True),
    "import": Verb(ImportConfig, "thinpipe.cli.import_model:run"),
    "completion": Verb(CompletionConfig, "thinpipe.cli.completion:run"),
}
