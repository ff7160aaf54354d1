"""What limits a plan, and what to change first: every small change is drafted, and the one that helps most is named.

Changes of settings cost nothing; a faster line or a machine does. A change that alters what is trained says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes
from thinpipe.models.config import ModelConfig
from thinpipe.plan.draft import Draft, Load, draft
from thinpipe.plan.machines import Hub, Machine, Machines
from thinpipe.train.config import RunConfig

_BUSY = 0.8
"""A part that has something to do for so much of a step is what limits it."""
_AS_BUSY = 0.9
"""Of the busiest: these are made faster together, since one alone would change nothing."""
_WORTH_IT = 1.03
MOST_PASSES = 12_000
"""Simulated for advice: larger plans try fewer changes, so that a plan answers at once."""


@dataclass(frozen=True, kw_only=True)
class Change:
    words: str
    faster: float
    """Times as fast as before."""


def bottleneck(plan: Draft) -> str:
    busiest = plan.loads[0]
    part, share = plan.say(busiest), f"{busiest.share:.0%} of a step"
    if busiest.share >= _BUSY:
        return f"{part}, busy for {share}"
    return f"waiting: nothing is busy for more than {share} ({part}); round trips and the pipeline's ends"


def advise(plan: Draft, *, everyone: bool = False) -> list[Change]:
    """The best first. Memory that is missing comes before speed."""
    missing = [_room(part.machine.name, part.missing_nbytes) for part in plan.parts if part.missing_nbytes]
    missing = [f"the hub would say: {plan.refusal}", *missing] if plan.refusal else missing
    if missing:
        return [Change(words=words, faster=1.0) for words in (*missing, *_memory_savers(plan))]
    found = []
    passes = 0
    for words, config, model, machines in _changes(plan):
        passes += 2 * config.microbatches * len(plan.parts)
        if passes > MOST_PASSES:
            break
        try:
            other = draft(config, model, machines, everyone=everyone)
        except UserError:
            continue
        faster = other.tokens_per_second / plan.tokens_per_second
        if other.fits and faster >= _WORTH_IT:
            found.append(Change(words=words, faster=faster))
    return sorted(found, key=lambda change: -change.faster)


def _room(name: str, missing: int) -> str:
    return f"{name} lacks {format_bytes(missing)}: give it fewer blocks, or a machine with more memory"


def _memory_savers(plan: Draft) -> Iterator[str]:
    config = plan.config
    if not config.execution.checkpoint_activations:
        yield "set execution.checkpoint_activations = true: a third more time, far fewer activations"
    if config.microbatch_size % 2 == 0:
        yield f"set parallelism.pipeline_parallel_microbatch_size = {config.microbatch_size // 2}: half the activations"
    if config.parallelism.pipeline_parallel_schedule == "GPipe":
        yield "set parallelism.pipeline_parallel_schedule = 1F1B, which keeps fewer micro-batches under way"


Candidate = tuple[str, RunConfig, ModelConfig, Machines]


def _changes(plan: Draft) -> Iterator[Candidate]:
    """The most promising first."""
    for words, config in _settings(plan.config, len(plan.parts)):
        yield words, config, plan.model, plan.machines
    yield from _hardware(plan)


def _settings(config: RunConfig, processes: int) -> Iterator[tuple[str, RunConfig]]:
    section, size = config.parallelism, config.microbatch_size
    for extra in (1, 2, 4) if section.pipeline_parallel_schedule == "1F1B" and processes > 1 else ():
        more = section.pipeline_parallel_extra_microbatches + extra
        words = f"set parallelism.pipeline_parallel_extra_microbatches = {more}: more messages are under way"
        yield from _valid(words, config, pipeline_parallel_extra_microbatches=more)
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
            "set parallelism.pipeline_parallel_schedule = GPipe: all forward passes are under way at once",
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


def _valid(words: str, config: RunConfig, **changes: object) -> Iterator[tuple[str, RunConfig]]:
    """With these settings of parallelism, if they make sense."""
    try:
        yield words, replace(config, parallelism=replace(config.parallelism, **changes))  # type: ignore[arg-type]
    except UserError:
        return


def _hardware(plan: Draft) -> Iterator[Candidate]:
    """Twice as much of what is busiest, and of all that is about as busy."""
    first = plan.loads[0]
    busy = [
        load
        for load in plan.loads
        if load.share >= _AS_BUSY * first.share and (load.part == "processor") == (first.part == "processor")
    ]
    machines = plan.machines
    for load in busy:
        machines = _improve(
            machines, None if load.process is None else plan.parts[load.process].machine.name, load.part
        )
    what = "machines" if first.part == "processor" else "lines"
    words = f"{what} twice as fast for {', '.join(dict.fromkeys(_owner(plan, load) for load in busy))}"
    yield words, plan.config, plan.model, machines


def _owner(plan: Draft, load: Load) -> str:
    return "the hub" if load.process is None else plan.parts[load.process].machine.name


def _improve(machines: Machines, name: str | None, part: str) -> Machines:
    """The hub, or the machine of this name."""
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


End = TypeVar("End", Machine, Hub)


def _twice(end: End, direction: str) -> End:
    """With a line twice as fast in the direction that is busy, or in both where they share it."""
    up, down = (1 if direction == "down" else 2), (1 if direction == "up" else 2)
    return replace(end, up_bps=up * end.up_bps, down_bps=down * end.down_bps)
