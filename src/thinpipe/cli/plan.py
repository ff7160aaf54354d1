"""`thinpipe plan`: reads the machines and the model, drafts, and prints. Imports no torch."""

from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from thinpipe.core.errors import UserError
from thinpipe.core.extras import need
from thinpipe.core.units import parse_count
from thinpipe.plan.advice import advise, bottleneck
from thinpipe.plan.bill import bill
from thinpipe.plan.config import PlanConfig
from thinpipe.plan.devices import precision_of
from thinpipe.plan.draft import Draft, draft
from thinpipe.plan.machines import Machines, from_status, load_machines
from thinpipe.plan.render import as_table, render
from thinpipe.plan.search import search
from thinpipe.plan.shape import model_of
from thinpipe.train.config import RunConfig


def run(config: PlanConfig) -> int:
    """1: it does not fit."""
    settings, everyone = config.as_run(), config.hub.everyone
    model, guessed = model_of(settings, config.vocab_size)
    machines = _machines(config.machines, settings)
    machines = replace(machines, assumptions=(*machines.assumptions, *guessed))
    tried = ""
    if config.search:
        found = search(settings, model, machines, everyone=everyone)
        before, settings, model = model, found.best.config, found.best.model
        end = "" if found.at_the_end else " (there may be better ones)"
        moved = (
            "" if model == before else "\nIts cut is another, and with it what is trained: compare more than its speed."
        )
        tried = f"{found.tried} combinations tried{end}. The fastest:\n{_as_flags(found.best)}{moved}"
    plan = draft(settings, model, machines, everyone=everyone, record=config.figure is not None)
    limit, changes = bottleneck(plan), advise(plan, everyone=everyone)
    cost = bill(plan, None if config.tokens is None else parse_count(config.tokens))
    if config.json:
        print(msgspec.json.encode(as_table(plan, limit, changes, cost)).decode())
    else:
        console = Console(highlight=False, markup=False)
        if tried:
            console.print(tried, soft_wrap=True)
        console.print(render(plan, limit, changes, cost))
    if config.figure is not None:
        from thinpipe.plan.figure import draw

        draw(plan, config.figure)
    return 0 if plan.fits else 1


def _as_flags(plan: Draft) -> str:
    """Of a run like this, whatever its file says."""
    section = plan.config.parallelism
    flags = {
        "model.boundaries": " ".join(map(str, plan.model.boundaries)),
        "parallelism.pipeline-parallel-schedule": section.pipeline_parallel_schedule,
        "parallelism.pipeline-parallel-microbatch-size": str(plan.config.microbatch_size),
        "parallelism.pipeline-parallel-extra-microbatches": str(section.pipeline_parallel_extra_microbatches),
        "parallelism.pipeline-parallel-shares": "None",
    }
    if plan.machines.hub is None:
        flags["parallelism.pipeline-parallel-degree"] = str(len(plan.parts))
    return "  " + " ".join(f"--{name} {value}" for name, value in flags.items() if value)


def _machines(named: Path | None, settings: RunConfig) -> Machines:
    if named is None:
        raise UserError(
            "a plan needs machines: --machines FILE (examples/machines.toml is one), or the folder of a hub's run"
        )
    if named.is_dir():
        need("nats", extra="swarm", what="a plan for the peers of a hub")
        from thinpipe.cli.swarm import ask_status

        return from_status(ask_status(named))
    return load_machines(named, precision=precision_of(settings))
