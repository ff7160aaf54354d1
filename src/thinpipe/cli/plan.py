"""`thinpipe plan`: loads machines and model, makes a plan (or searches for the fastest), prints it. No torch, unless it
is for this machine."""

from dataclasses import replace
from pathlib import Path

import msgspec
from rich.console import Console

from thinpipe.api.planning import machines_here_or_in, model_to_plan, plan_for
from thinpipe.config.plan import PlanConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra
from thinpipe.core.units import parse_count
from thinpipe.planning.advice import advise, bottleneck
from thinpipe.planning.alternatives import find_alternatives
from thinpipe.planning.devices import precision_of
from thinpipe.planning.machines import Machines
from thinpipe.planning.planner import Plan, estimate_cost
from thinpipe.planning.render import as_dict, render
from thinpipe.planning.search import SearchResult
from thinpipe.planning.stored_model import PlannedModel
from thinpipe.swarm.protocol.status import machines_from_status


def run(config: PlanConfig) -> int:
    """Exit code 1 if the plan does not fit."""
    settings, use_all_peers = config.as_run(), config.hub.use_all_peers
    model, guessed = model_to_plan(settings, config.vocab_size)
    machines = _load_machines(config.machines, settings, model)
    machines = replace(machines, assumptions=(*machines.assumptions, *guessed))
    plan, found = plan_for(
        settings,
        model,
        machines,
        find_fastest=config.search,
        use_all_peers=use_all_peers,
        record=config.figure is not None,
    )
    limit, changes = bottleneck(plan), advise(plan, use_all_peers=use_all_peers)
    cost = estimate_cost(plan, None if config.tokens is None else parse_count(config.tokens))
    others = find_alternatives(plan, cost)
    if config.json:
        print(msgspec.json.encode(as_dict(plan, limit, changes, cost, others)).decode())
    else:
        console = Console(highlight=False, markup=False)
        if found is not None:
            console.print(_describe_search(found, model), soft_wrap=True)
        console.print(render(plan, limit, changes, cost, others))
    if config.figure is not None:
        from thinpipe.planning.simulation.timeline_figure import draw_timeline

        draw_timeline(plan, config.figure)
    return 0 if plan.fits else 1


def _describe_search(found: SearchResult, model: PlannedModel) -> str:
    """What the search tried and chose; `model` is that of the settings."""
    end = "" if found.converged else " (the search was cut off: there may be faster ones)"
    moved = (
        ""
        if found.best.model == model
        else "\nIts boundaries differ from those of the settings, so it is another model: compare its loss too."
    )
    return f"{found.tried} combinations tried{end}. The fastest:\n{_as_cli_flags(found.best)}{moved}"


def _as_cli_flags(plan: Plan) -> str:
    """Flags of `thinpipe train` or `thinpipe hub` that set what the search chose, whatever the settings file says."""
    section = plan.config.parallelism
    flags = {
        "model.boundaries": " ".join(map(str, plan.model.boundaries)),
        "parallelism.pipeline-parallel-schedule": section.pipeline_parallel_schedule,
        "parallelism.pipeline-parallel-microbatch-size": str(plan.config.microbatch_size),
        "parallelism.pipeline-parallel-extra-microbatches": str(section.pipeline_parallel_extra_microbatches),
        "parallelism.pipeline-parallel-shares": "None",
    }
    if plan.machines.hub is None:
        flags["parallelism.pipeline-parallel-degree"] = str(len(plan.machine_loads))
    return "  " + " ".join(f"--{name} {value}" for name, value in flags.items() if value)


def _load_machines(named: Path | None, settings: RunConfig, model: PlannedModel) -> Machines:
    if named is None:
        raise UserError(
            "a plan needs machines: --machines here for this machine, a file (examples/machines.toml is one), or the "
            "dump_folder of a hub's run"
        )
    if named.is_dir():
        require_extra("nats", extra="swarm", feature="a plan for the peers of a hub")
        from thinpipe.cli.hub_commands import ask_status

        return machines_from_status(ask_status(named), precision_of(settings))
    return machines_here_or_in(named, settings, model)
