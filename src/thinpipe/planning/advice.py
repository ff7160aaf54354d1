"""Bottleneck of a plan, and the changes that help most: each small change is planned and its speedup compared.

Changes of settings are tried before changes of hardware. A change that affects the training result says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes
from thinpipe.planning.fitting import ways_to_fit
from thinpipe.planning.machines import Hub, Machine, Machines
from thinpipe.planning.planner import Plan, Utilization, make_plan, memory_need
from thinpipe.planning.stored_model import PlannedModel

_BOTTLENECK_SHARE = 0.8
"""Busy share of a step from which a processor or link counts as the bottleneck."""
_EQUALLY_BUSY = 0.9
"""Resources at least this busy, relative to the busiest, are upgraded together: upgrading one would change nothing."""
_MIN_SPEEDUP = 1.03
_SHOWN_LACKING = 2
"""Machines without enough memory that are named one by one."""
MAX_PASSES = 12_000
"""Budget of simulated passes: larger plans try fewer changes, so that `thinpipe plan` stays fast."""


@dataclass(frozen=True, kw_only=True)
class Change:
    description: str
    speedup: float
    """Ratio of tokens/s after and before the change."""
    is_purchase: bool = False
    """True for faster machines or links, false for settings."""


def bottleneck(plan: Plan) -> str:
    """Description of what limits the plan's speed."""
    busiest = plan.utilizations[0]
    part, share = plan.describe(busiest), f"{busiest.share:.0%} of a step"
    if busiest.share >= _BOTTLENECK_SHARE:
        return f"{part}, busy for {share}"
    return f"waiting: nothing is busy for more than {share} ({part}); round trips and the pipeline's ends"


def advise(plan: Plan, *, use_all_peers: bool = False) -> list[Change]:
    """Changes of settings, the largest speedup first, then of hardware; for a plan that does not fit, what memory is
    missing and how to save some."""
    if not plan.fits:
        return [Change(description=line, speedup=1.0) for line in _how_to_fit(plan, use_all_peers=use_all_peers)]
    found = []
    passes = 0
    for description, config, model, machines in _changes(plan):
        is_purchase = machines is not plan.machines
        passes += 2 * config.microbatches * len(plan.machine_loads)
        if passes > MAX_PASSES:
            break
        try:
            other = make_plan(config, model, machines, use_all_peers=use_all_peers, chats=plan.chats)
        except UserError:
            continue
        speedup = other.tokens_per_second / plan.tokens_per_second
        if other.fits and speedup >= _MIN_SPEEDUP:
            found.append(Change(description=description, speedup=speedup, is_purchase=is_purchase))
    return sorted(found, key=lambda change: (change.is_purchase, -change.speedup))


def _how_to_fit(plan: Plan, *, use_all_peers: bool) -> Iterator[str]:
    if plan.refusal:
        yield f"the hub would say: {plan.refusal}"
    lacking = [load for load in plan.machine_loads if not load.fits]
    for load in lacking[:_SHOWN_LACKING]:
        missing, kind = load.missing_nbytes, "memory"
        if not missing:
            missing, kind = load.missing_host_nbytes, "host memory"
        more = len(lacking) - _SHOWN_LACKING
        others = f", and {more} more machines lack some" if more > 0 and load is lacking[_SHOWN_LACKING - 1] else ""
        yield f"{load.machine.name} lacks {format_bytes(missing)} of {kind}: give it fewer blocks{others}"
    if plan.config.parallelism.pipeline_parallel_schedule == "GPipe" and len(plan.machine_loads) > 1:
        yield "set parallelism.pipeline_parallel_schedule = 1F1B, which keeps fewer micro-batches in flight"
    need = partial(memory_need, model=plan.model, machines=plan.machines, use_all_peers=use_all_peers, chats=plan.chats)
    steps = ways_to_fit(plan.config, need)
    for index, step in enumerate(steps):
        yield f"{'and set' if index else 'set'} {step.in_words()}"
    if not steps or not steps[-1].need.fits:
        yield "more machines, or machines with more memory"


Candidate = tuple[str, RunConfig, PlannedModel, Machines]


def _changes(plan: Plan) -> Iterator[Candidate]:
    """Candidates in order of promise: settings, then hardware."""
    for description, config in _settings(plan.config, len(plan.machine_loads)):
        yield description, config, plan.model, plan.machines
    yield from _hardware(plan)


def _settings(config: RunConfig, processes: int) -> Iterator[tuple[str, RunConfig]]:
    section, size = config.parallelism, config.microbatch_size
    for extra in (1, 2, 4) if section.pipeline_parallel_schedule == "1F1B" and processes > 1 else ():
        more = section.pipeline_parallel_extra_microbatches + extra
        description = f"set parallelism.pipeline_parallel_extra_microbatches = {more}: more messages are in flight"
        yield from _valid(description, config, pipeline_parallel_extra_microbatches=more)
    if size % 2 == 0 and processes > 1:
        yield from _valid(
            f"set parallelism.pipeline_parallel_microbatch_size = {size // 2}: a shorter ramp at either end of a step",
            config,
            pipeline_parallel_microbatch_size=size // 2,
        )
    if config.training.global_batch_size >= 2 * size:
        yield from _valid(
            f"set parallelism.pipeline_parallel_microbatch_size = {size * 2}: fewer, larger messages",
            config,
            pipeline_parallel_microbatch_size=size * 2,
        )
    if section.pipeline_parallel_schedule == "1F1B":
        yield from _valid(
            "set parallelism.pipeline_parallel_schedule = GPipe: all forward passes are in flight at once",
            config,
            pipeline_parallel_schedule="GPipe",
            pipeline_parallel_extra_microbatches=0,
        )
    batch = _larger_batch(config, 2)
    if batch is not None and processes > 1:
        yield f"set training.global_batch_size = {batch.training.global_batch_size} (changes what is trained)", batch


def _larger_batch(config: RunConfig, times: int) -> RunConfig | None:
    training = replace(config.training, global_batch_size=times * config.training.global_batch_size)
    parallelism = replace(config.parallelism, pipeline_parallel_microbatch_size=config.microbatch_size)
    try:
        return replace(config, training=training, parallelism=parallelism)
    except UserError:
        return None


def _valid(description: str, config: RunConfig, **changes: object) -> Iterator[tuple[str, RunConfig]]:
    """The config with these settings of `parallelism`, unless they are invalid."""
    try:
        yield description, replace(config, parallelism=replace(config.parallelism, **changes))  # type: ignore[arg-type]
    except UserError:
        return


def _hardware(plan: Plan) -> Iterator[Candidate]:
    """Doubles the speed of the busiest resource and of those of its kind that are about as busy."""
    first = plan.utilizations[0]
    busy = [
        utilization
        for utilization in plan.utilizations
        if utilization.share >= _EQUALLY_BUSY * first.share
        and (utilization.resource == "processor") == (first.resource == "processor")
    ]
    machines = plan.machines
    for utilization in busy:
        machines = _improve(
            machines,
            None if utilization.process is None else plan.machine_loads[utilization.process].machine.name,
            utilization.resource,
        )
    what = "machines" if first.resource == "processor" else "links"
    description = (
        f"{what} twice as fast for {', '.join(dict.fromkeys(_owner(plan, utilization) for utilization in busy))}"
    )
    yield description, plan.config, plan.model, machines


def _owner(plan: Plan, utilization: Utilization) -> str:
    return "the hub" if utilization.process is None else plan.machine_loads[utilization.process].machine.name


def _improve(machines: Machines, name: str | None, part: str) -> Machines:
    """Doubles one resource of the hub (`name` None) or of the machine called `name`."""
    if name is None:
        assert machines.hub is not None
        return replace(machines, hub=_twice(machines.hub, part))
    changed = (
        each
        if each.name != name
        else replace(each, flops=2 * each.flops)
        if part == "processor"
        else _twice(each, part)
        for each in machines.machines
    )
    return replace(machines, machines=tuple(changed))


LinkOwner = TypeVar("LinkOwner", Machine, Hub)


def _twice(end: LinkOwner, direction: str) -> LinkOwner:
    """Doubles the link's rate in `direction`, or in both directions for a half-duplex link."""
    up, down = (1 if direction == "down" else 2), (1 if direction == "up" else 2)
    return replace(end, up_bps=up * end.up_bps, down_bps=down * end.down_bps)
