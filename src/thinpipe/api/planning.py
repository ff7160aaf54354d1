"""`plan` predicts memory, speed and traffic of a run on given machines. No torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from thinpipe.api.settings import run_settings
from thinpipe.api.this_machine import HERE, this_machine
from thinpipe.config.boundary import refuse_registered_compressors
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra
from thinpipe.models.hf.model_hub import HubModel
from thinpipe.planning.devices import precision_of
from thinpipe.planning.machines import Machines, load_machines
from thinpipe.planning.model_shape import has_chats, resolve_model
from thinpipe.planning.planner import Plan, make_plan
from thinpipe.planning.search import SearchResult, search
from thinpipe.planning.stored_model import PlannedModel, StoredModel, cut, stored_model_of


def plan(
    config: RunConfig | Path | str,
    machines: Path | str,
    *,
    vocab_size: int | None = None,
    find_fastest: bool = False,
    use_all_peers: bool = False,
    **overrides: Any,
) -> Plan:
    """The plan of a run on the machines of a file (as examples/machines.toml), or on this one with "here": `fits`,
    `tokens_per_second`, `nbytes_per_token` and, per machine, `machine_loads`.

    `config` and `overrides` as in `train`. `vocab_size`: by default that of the tokens in `data.path`, else the
    preset's. `find_fastest`: searches for the boundaries, schedule and micro-batches that are fastest on these
    machines; `Plan.config` and `Plan.model` have them. `use_all_peers`: with a hub, no machine is left as a standby.
    Raises UserError.
    """
    settings = run_settings(config, overrides)
    refuse_registered_compressors(settings.boundary, "`plan`")
    model, guessed = model_to_plan(settings, vocab_size)
    known = machines_here_or_in(machines, settings, model)
    known = replace(known, assumptions=(*known.assumptions, *guessed))
    return plan_for(settings, model, known, find_fastest=find_fastest, use_all_peers=use_all_peers)[0]


def machines_here_or_in(named: Path | str, settings: RunConfig, model: PlannedModel) -> Machines:
    """The machines of a file, or this machine if "here" is named and no file is called so. Raises UserError."""
    if str(named) == HERE and not Path(named).exists():
        return this_machine(settings, model)
    return load_machines(Path(named), precision=precision_of(settings))


def model_to_plan(settings: RunConfig, vocab_size: int | None) -> tuple[PlannedModel, list[str]]:
    """The model of a run whose tokens and weights may not be here yet, and what was assumed, one sentence each. Of a
    Hugging Face model its config.json is enough. Raises UserError."""
    source = settings.model.hf
    if source is None:
        return resolve_model(settings, vocab_size)
    if vocab_size is not None:
        raise UserError("--vocab-size is for models of thinpipe: model.hf has the vocabulary of its config.json")
    try:
        here = stored_model_of(settings)
    except UserError:
        if HubModel.of(source) is None:
            raise
        here = None  # no connection to the model hub: config.json may be in the cache
    if here is not None:
        return here, []
    require_extra("transformers", extra="tune", feature="the plan of a model of which only config.json is here")
    from thinpipe.models.hf.base_files import pinned_source
    from thinpipe.models.hf.base_shapes import base_shapes  # transformers takes seconds to import
    from thinpipe.models.hf.config import CONFIG, read_json_object

    stated = read_json_object(pinned_source(source)[1] / CONFIG)
    model = StoredModel.of_shapes(base_shapes(stated), stated)
    return cut(model, settings), [f"shapes of {source} by its config.json: its weights are not here"]


def plan_for(
    settings: RunConfig,
    model: PlannedModel,
    machines: Machines,
    *,
    find_fastest: bool,
    use_all_peers: bool,
    record: bool = False,
) -> tuple[Plan, SearchResult | None]:
    """The plan, and with `find_fastest` the result of the search. `record`: the plan keeps the timeline of a step."""
    chats = has_chats(settings)
    found = search(settings, model, machines, use_all_peers=use_all_peers, chats=chats) if find_fastest else None
    if found is not None:
        settings, model = found.best.config, found.best.model
    return make_plan(settings, model, machines, use_all_peers=use_all_peers, chats=chats, record=record), found
