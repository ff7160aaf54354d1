"""`thinpipe plan`: reads the machines and the model, drafts, and prints. Imports no torch."""

from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_count
from thinpipe.plan.advice import advise, bottleneck
from thinpipe.plan.bill import bill
from thinpipe.plan.config import PlanConfig
from thinpipe.plan.devices import precision_of
from thinpipe.plan.draft import draft
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
        settings, model = found.best.config, found.best.model
        end = "" if found.at_the_end else " in the time there was"
        tried = f"{found.tried} combinations tried{end}. The best:\n{_as_flags(settings, model.boundaries)}"
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


def _as_flags(config: RunConfig, boundaries: tuple[int, ...]) -> str:
    """Flags that make a run like this."""
    section = config.parallelism
    flags = [
        f"--model.boundaries {' '.join(map(str, boundaries))}" if boundaries else "",
        f"--parallelism.pipeline-parallel-schedule {section.pipeline_parallel_schedule}",
        f"--parallelism.pipeline-parallel-microbatch-size {config.microbatch_size}",
    ]
    if section.pipeline_parallel_extra_microbatches:
        extra = section.pipeline_parallel_extra_microbatches
        flags.append(f"--parallelism.pipeline-parallel-extra-microbatches {extra}")
    return "  " + " ".join(flag for flag in flags if flag)


def _machines(named: Path | None, settings: RunConfig) -> Machines:
    if named is None:
        raise UserError(
            "a plan needs machines: --machines FILE (examples/machines.toml is one), or the folder of a hub's run"
        )
    if named.is_dir():
        from thinpipe.cli.swarm import ask_status  # needs the extra `swarm`

        return from_status(ask_status(named))
    return load_machines(named, precision=precision_of(settings))
