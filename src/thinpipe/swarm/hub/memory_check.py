"""Refuses to host a run that cannot fit into this machine's memory, before torch is imported or weights are made.

A hub makes the first weights, one segment at a time; what its peers need it knows once they are measured. The peers of
`thinpipe up` share this machine, so that they must fit together. Setting: training.check_memory.
"""

from dataclasses import replace

from thinpipe.config.hub import HubConfig, UpConfig
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes
from thinpipe.device.host import is_surely_cpu, refuse_absent_accelerator
from thinpipe.planning.fitting import LocalFit
from thinpipe.planning.model_shape import resolve_model
from thinpipe.planning.segment_costs import segment_costs, shared_nbytes
from thinpipe.planning.stored_model import PlannedModel, stored_model_of
from thinpipe.training.memory_check import host_budget, refuse_if_too_large


def check_hub(config: HubConfig) -> None:
    """Raises UserError if the largest segment's weights do not fit on the hub's machine."""
    _check_first_weights(config.as_run())


def check_up(config: UpConfig) -> None:
    """Raises UserError if a hub and its peers do not fit on this machine together."""
    run = config.as_hub().as_run()
    refuse_absent_accelerator(run.training.device)
    _check_first_weights(run)
    model = _model(run)
    if model is None or not is_surely_cpu(run.training.device):  # each peer checks what it is assigned
        return
    peers = min(config.peers, len(model.segments))
    try:
        together = replace(run, parallelism=replace(run.parallelism, pipeline_parallel_degree=peers))
    except UserError:  # fewer micro-batches than peers: the hub leaves some of them out
        return
    fit = LocalFit(model=model, budget=host_budget(), ranks=tuple(range(peers)), starting=config.peers + 1)
    refuse_if_too_large(together, fit)


def _model(run: RunConfig) -> PlannedModel | None:
    """None if the size is not to be checked, or not known: of a published model of which no weights are here, and of
    invalid settings, of which the hub itself says more."""
    if not run.training.check_memory:
        return None
    try:
        return resolve_model(run, None)[0] if run.model.hf is None else stored_model_of(run)
    except UserError:
        return None


def _check_first_weights(run: RunConfig) -> None:
    model = _model(run) if run.model.hf is None else None  # weights of a published model are not made
    if model is None:
        return
    budget, costs = host_budget(), segment_costs(model, run)
    index = max(range(len(costs)), key=lambda each: costs[each].weights_nbytes)
    needed = costs[index].weights_nbytes + shared_nbytes(model, run) + budget.process_nbytes
    if needed > budget.usable_nbytes:
        raise UserError(
            f"the hub makes the first weights, one segment after the other, and segment {index} needs "
            f"{format_bytes(needed)} of memory on {budget.place}, where {format_bytes(budget.usable_nbytes)} can be "
            "used: cut the model into more segments (model.boundaries), or host it on a machine with more memory. "
            "training.check_memory = false starts the hub all the same"
        )
