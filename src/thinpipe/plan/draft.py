"""One plan: machines given their segments, memory counted, a step simulated. Pure arithmetic on what it is told.

Who gets which segments is decided as it will be: by the hub's own rule where there is a hub, else in the order of the
file and in the shares of the run. What is assumed is kept in words beside the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from thinpipe.core.errors import UserError
from thinpipe.models.config import ModelConfig
from thinpipe.pipeline.placement import LAYOUTS, Placement, place
from thinpipe.plan.actions import Action, action_lists
from thinpipe.plan.lines import LineSpec
from thinpipe.plan.machines import Hub, Machine, Machines
from thinpipe.plan.messages import Messages, message_nbytes
from thinpipe.plan.needs import SegmentNeed, memory_nbytes, segment_needs, shared_nbytes
from thinpipe.plan.parts import Part, held_at_once, part_of
from thinpipe.plan.simulate import Job, StageWork, Timeline, simulate
from thinpipe.swarm.assign import Need, Traffic, assign
from thinpipe.train.config import RunConfig
from thinpipe.train.under_way import under_way

_EXCHANGED_PER_PARAMETER_TENSOR = 8
"""Bytes: the norm of each, in the one exchange of a step."""


class Load(NamedTuple):
    """How busy a processor or a line is."""

    share: float
    """Of a step."""
    process: int | None
    """None: the hub."""
    part: str
    """processor, up, down, or both ways where both directions share a line."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    config: RunConfig
    model: ModelConfig
    machines: Machines
    parts: tuple[Part, ...]
    """In the order of the pipeline."""
    spares: tuple[str, ...]
    messages: Messages
    timeline: Timeline
    assumptions: tuple[str, ...]
    refusal: str = ""
    """Why a hub would not begin, if it would not."""

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.timeline.seconds

    @property
    def fits(self) -> bool:
        return not self.refusal and not any(part.missing_nbytes for part in self.parts)

    @property
    def nbytes_per_token(self) -> float:
        """Over one boundary, both directions, ids counted."""
        return (self.messages.forward_nbytes + self.messages.backward_nbytes) / _rows(self.config)

    @property
    def times_fewer_bytes(self) -> float:
        """Than dense bf16 both ways, its ids counted."""
        ids = self.messages.ids_nbytes / _rows(self.config)
        return (4 * self.model.dim + ids) / self.nbytes_per_token if self.nbytes_per_token else 1.0

    @cached_property
    def loads(self) -> list[Load]:
        """Of every processor and line, the busiest first."""
        seconds = self.timeline.seconds
        loads = [Load(busy / seconds, process, "processor") for process, busy in enumerate(self.timeline.busy)]
        loads += [load_of(line, busy / seconds) for line, busy in self.timeline.line_busy.items()]
        return sorted(loads, key=lambda load: -load.share)

    def say(self, load: Load) -> str:
        if load.process is None:
            return f"the hub's line ({load.part})"
        name = self.parts[load.process].machine.name
        return f"the processor of {name}" if load.part == "processor" else f"the line of {name} ({load.part})"


def _rows(config: RunConfig) -> int:
    """Tokens of a micro-batch."""
    return config.microbatch_size * config.training.seq_len


def load_of(line: str, share: float) -> Load:
    """Of a line of the simulation: "up 0", "hub down"; "line 0" and "hub" where both directions share one."""
    words = line.split()
    direction = next((word for word in words if word in ("up", "down")), "both ways")
    return Load(share, None if words[0] == "hub" else int(words[1]), direction)


def draft(
    config: RunConfig, model: ModelConfig, machines: Machines, *, everyone: bool = False, record: bool = False
) -> Draft:
    """`everyone`: every machine gets something, as `hub.everyone` wants it. `record`: keep its spans."""
    needs = segment_needs(model, config)
    messages = message_nbytes(model, config)
    seats = _place(config, model, machines, needs, messages, everyone=everyone)
    chosen, placement = seats.chosen, seats.placement
    schedule, processes = config.parallelism.pipeline_parallel_schedule, len(chosen)
    extra = config.parallelism.pipeline_parallel_extra_microbatches
    actions = action_lists(schedule if processes > 1 else "1F1B", processes, config.microbatches, extra=extra)
    timeline = simulate(_job(config, model, machines, chosen, placement, needs, messages, actions), record=record)
    held = held_at_once(actions, len(placement.stages))
    parts = tuple(
        part_of(machine, placement, process, config, model, needs, held) for process, machine in enumerate(chosen)
    )
    used = {machine.name for machine in chosen}
    return Draft(
        config=config,
        model=model,
        machines=machines,
        parts=parts,
        spares=tuple(machine.name for machine in machines.machines if machine.name not in used),
        messages=messages,
        timeline=timeline,
        assumptions=(*machines.assumptions, *_started_with(config, machines, len(chosen))),
        refusal=seats.refusal,
    )


def _started_with(config: RunConfig, machines: Machines, processes: int) -> list[str]:
    if machines.hub is not None or processes == 1 or config.parallelism.pipeline_parallel_degree == processes:
        return []
    return [f"the run is started with --parallelism.pipeline-parallel-degree {processes}"]


@dataclass(frozen=True, kw_only=True)
class _Seats:
    """Machines in the order of the pipeline, and their stages."""

    chosen: Sequence[Machine]
    placement: Placement
    refusal: str = ""
    """What a hub would say instead of beginning."""


def _place(
    config: RunConfig,
    model: ModelConfig,
    machines: Machines,
    needs: Sequence[SegmentNeed],
    messages: Messages,
    *,
    everyone: bool,
) -> _Seats:
    parallelism, segments, there = config.parallelism, len(needs), len(machines.machines)
    layout = LAYOUTS[parallelism.pipeline_parallel_schedule]
    if machines.hub is not None:
        _refuse_without_hub(config)
        return _as_the_hub_would(config, model, machines, needs, messages, everyone=everyone)
    wanted = parallelism.pipeline_parallel_degree
    if wanted > there:
        raise UserError(
            f"parallelism.pipeline_parallel_degree is {wanted}, and there are {there} machines: add some to the file, "
            "or lower it"
        )
    count = wanted if wanted > 1 else min(there, max(1, segments // layout.stages_per_process))
    shares = parallelism.pipeline_parallel_shares
    placement = place(parallelism.pipeline_parallel_schedule, count, segments, shares)
    return _Seats(chosen=machines.machines[:count], placement=placement)


def _refuse_without_hub(config: RunConfig) -> None:
    """What a hub refuses or decides by itself."""
    parallelism = config.parallelism
    if LAYOUTS[parallelism.pipeline_parallel_schedule].stages_per_process != 1:
        raise UserError(
            f"a hub gives every peer segments that follow each other, and {parallelism.pipeline_parallel_schedule} "
            "wants them from two places: set parallelism.pipeline_parallel_schedule to GPipe or 1F1B, or drop [hub]"
        )
    if parallelism.pipeline_parallel_shares is not None:
        raise UserError("a hub gives out segments by itself: leave parallelism.pipeline_parallel_shares out, or [hub]")


def _as_the_hub_would(
    config: RunConfig,
    model: ModelConfig,
    machines: Machines,
    needs: Sequence[SegmentNeed],
    messages: Messages,
    *,
    everyone: bool,
) -> _Seats:
    """With the figures that `train/hosting.py` gives to the same rule."""
    assert machines.hub is not None
    rows, count = _rows(config), len(needs)
    schedule = config.parallelism.pipeline_parallel_schedule
    most = config.microbatches if schedule == "1F1B" else None
    wanted = [
        Need(
            flops_per_token=need.forward_flops_per_token + need.backward_flops_per_token,
            memory_nbytes=memory_nbytes(need, config, under_way(index, count, count, config)),
        )
        for index, need in enumerate(needs)
    ]
    try:
        found = assign(
            wanted,
            [machine.for_assigning() for machine in machines.machines],
            Traffic(forward_nbytes=messages.forward_nbytes / rows, backward_nbytes=messages.backward_nbytes / rows),
            hub_up_bps=machines.hub.up_bps,
            hub_down_bps=machines.hub.down_bps,
            shared_nbytes=shared_nbytes(model, config),
            most=most,
            everyone=everyone,
        )
    except UserError as error:  # show by how much it does not fit, in the file's order
        number = min(count, len(machines.machines), most or count)
        return _Seats(chosen=machines.machines[:number], placement=place(schedule, number, count), refusal=str(error))
    by_name = {machine.name: machine for machine in machines.machines}
    stages = [segments for _, segments in found.places]
    return _Seats(
        chosen=[by_name[name] for name, _ in found.places],
        placement=Placement(stages, [[index] for index in range(len(stages))]),
    )


def _job(
    config: RunConfig,
    model: ModelConfig,
    machines: Machines,
    chosen: Sequence[Machine],
    placement: Placement,
    needs: Sequence[SegmentNeed],
    messages: Messages,
    actions: list[list[Action]],
) -> Job:
    home = {stage: chosen[process] for process, stages in enumerate(placement.processes) for stage in stages}
    tokens = _rows(config)
    works = []
    for stage, segments in enumerate(placement.stages):
        forward = sum(needs[segment].forward_flops_per_token for segment in segments) * tokens
        backward = sum(needs[segment].backward_flops_per_token for segment in segments) * tokens
        speed, more = home[stage].flops, home[stage].pass_s
        # Of a backward pass about half is for the input and half for the weights.
        half = backward / 2 / speed
        works.append(StageWork(forward_s=forward / speed + more, input_s=half + more, weight_s=half))
    hosts = sorted({machine.host for machine in chosen if machine.host is not None})
    numbers = {host: index for index, host in enumerate(hosts)}
    alone = len(hosts)
    tensors = 12 * model.n_layers + 4
    return Job(
        actions=actions,
        works=works,
        lines=[_line(machine) for machine in chosen],
        hub=None if machines.hub is None else _line_of_hub(machines.hub),
        forward_nbytes=messages.forward_nbytes,
        backward_nbytes=messages.backward_nbytes,
        hosts=[
            alone + index if machine.host is None else numbers[machine.host] for index, machine in enumerate(chosen)
        ],
        cores={numbers[machine.host]: machine.cores for machine in chosen if machine.host and machine.cores},
        exchange_nbytes=_EXCHANGED_PER_PARAMETER_TENSOR * tensors,
    )


def _line_of_hub(hub: Hub) -> LineSpec:
    return LineSpec(up_bps=hub.up_bps, down_bps=hub.down_bps, latency_s=hub.latency_s)


def _line(machine: Machine) -> LineSpec:
    return LineSpec(
        up_bps=machine.up_bps,
        down_bps=machine.down_bps,
        latency_s=machine.latency_s,
        duplex=machine.duplex,
        latency_per=machine.latency_per,
    )
