"""One machine alone with a published model that its card cannot hold: all state is in the host's memory, and the blocks
are copied to the card for every pass of a micro-batch, as other tools offload (thinpipe does not: `training.offload`
moves moments alone). Planned so that a plan can say when friends are not worth it.

At best: copies in both directions run while the card computes, at the full rate of its bus.
"""

from collections.abc import Iterator
from dataclasses import replace

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.planning.machine_loads import MemoryUse
from thinpipe.planning.machines import Machine, Machines
from thinpipe.planning.planner import Plan, make_plan
from thinpipe.planning.segment_costs import without_offload
from thinpipe.planning.stored_model import StoredModel

_BLOCKS_ON_CARD = 2
"""The block that computes, and the next one, which is on its way."""


def stream_on(machine: Machine, config: RunConfig, model: StoredModel) -> Plan | None:
    """The fastest plan with copies for every micro-batch; None if card or host has too little memory. `config`:
    settings of one process."""
    if machine.host_memory_nbytes is None:
        return None
    plans = [made for each in _microbatches(without_offload(config)) if (made := _plan(machine, each, model))]
    return max(plans, key=lambda plan: plan.tokens_per_second, default=None)


def _microbatches(config: RunConfig) -> Iterator[RunConfig]:
    """The run's micro-batches, and larger ones: fewer copies."""
    size = config.microbatch_size
    while config.training.global_batch_size % size == 0:
        yield replace(config, parallelism=replace(config.parallelism, pipeline_parallel_microbatch_size=size))
        size *= 2


def _plan(machine: Machine, config: RunConfig, model: StoredModel) -> Plan | None:
    roomy = replace(machine, memory_nbytes=1 << 62)
    try:
        plan = make_plan(config, replace(model, boundaries=()), Machines(machines=(roomy,)))
    except UserError:
        return None
    use = plan.machine_loads[0].memory
    copied = _copied_nbytes(use)
    on_card = use.activations + use.overhead + _BLOCKS_ON_CARD * (copied + use.gradients) // model.n_layers
    in_host = copied + use.gradients + use.optimiser
    if on_card > machine.memory_nbytes or machine.host_memory_nbytes is None or in_host > machine.host_memory_nbytes:
        return None
    seconds = config.microbatches * (2 * copied + use.gradients) / machine.copy_bytes_per_second
    return replace(plan, timeline=replace(plan.timeline, seconds=max(seconds, plan.timeline.seconds)))


def _copied_nbytes(use: MemoryUse) -> int:
    """Bytes that go to the card for a forward and again for a backward pass."""
    return use.weights + use.frozen
