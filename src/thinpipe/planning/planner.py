"""Performance model of a run: places segments on machines, counts memory, simulates one step. Nothing is measured.

Segments are placed as the run will place them: by the hub's partitioning rule (`partition.py`) if there is a hub, else
in the order of the machines file, with the shares of `parallelism.pipeline_parallel_shares`. Assumptions are listed as
text in the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.pipeline.placement import SCHEDULE_LAYOUTS, Placement, place
from thinpipe.planning.fitting import Need
from thinpipe.planning.machine_loads import MachineLoad, machine_load_of, peak_in_flight
from thinpipe.planning.machines import Hub, Machine, Machines
from thinpipe.planning.messages import MessageSizes, message_sizes
from thinpipe.planning.partition import make_partition
from thinpipe.planning.segment_cost import SegmentCost
from thinpipe.planning.segment_costs import needs_by_kernel, segment_costs, shared_nbytes
from thinpipe.planning.simulation.links import LinkSpec
from thinpipe.planning.simulation.schedule_actions import Action, action_lists
from thinpipe.planning.simulation.simulate import StageTimes, StepSpec, Timeline, simulate
from thinpipe.planning.stored_model import PlannedModel

_ALLREDUCE_NBYTES_PER_TENSOR = 8
"""Bytes that each parameter tensor adds to the one all-reduce of a step: its gradient norm."""


class Utilization(NamedTuple):
    """How busy a processor or a link is during one step."""

    share: float
    """Busy share of the step's duration, 0 to 1."""
    process: int | None
    """Index of the process in pipeline order. None: the hub."""
    resource: str
    """One of "processor", "up", "down", and "both directions" for a half-duplex link."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Predicted memory, speed and traffic of a run on given machines."""

    config: RunConfig
    model: PlannedModel
    machines: Machines
    machine_loads: tuple[MachineLoad, ...]
    """Machines that compute, in pipeline order, with their segments and memory."""
    standbys: tuple[str, ...]
    """Names of machines without a stage."""
    messages: MessageSizes
    timeline: Timeline
    assumptions: tuple[str, ...]
    """Assumptions behind the figures, one sentence each."""
    refusal: str = ""
    """Error with which the hub would refuse to start the run; empty if the hub would start it."""
    chats: bool = False
    """Whether messages hold the flags of chats."""

    @property
    def tokens_per_step(self) -> int:
        return self.config.training.global_batch_size * self.config.training.seq_len

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.timeline.seconds

    @property
    def fits(self) -> bool:
        return not self.refusal and all(machine_load.fits for machine_load in self.machine_loads)

    @property
    def nbytes_per_token(self) -> float:
        """Payload bytes per token at one boundary: forward and backward messages, token ids or flags included."""
        return (self.messages.forward_nbytes + self.messages.backward_nbytes) / _rows(self.config)

    @property
    def compression_ratio(self) -> float:
        """Bytes of a dense bf16 boundary (both directions, token ids included) divided by `nbytes_per_token`."""
        ids = self.messages.ids_nbytes / _rows(self.config)
        return (4 * self.model.dim + ids) / self.nbytes_per_token if self.nbytes_per_token else 1.0

    @cached_property
    def utilizations(self) -> list[Utilization]:
        """Utilization of every processor and link, busiest first."""
        seconds = self.timeline.seconds
        utilizations = [
            Utilization(busy / seconds, process, "processor") for process, busy in enumerate(self.timeline.busy)
        ]
        utilizations += [utilization_of(link, busy / seconds) for link, busy in self.timeline.link_busy.items()]
        return sorted(utilizations, key=lambda utilization: -utilization.share)

    def describe(self, utilization: Utilization) -> str:
        if utilization.process is None:
            return f"the hub's link ({utilization.resource})"
        name = self.machine_loads[utilization.process].machine.name
        return (
            f"the processor of {name}"
            if utilization.resource == "processor"
            else f"the link of {name} ({utilization.resource})"
        )


def _rows(config: RunConfig) -> int:
    """Number of tokens in a micro-batch."""
    return config.microbatch_size * config.training.seq_len


def utilization_of(link: str, share: float) -> Utilization:
    """Parses a link name of the simulation: "up 0", "hub down"; "link 0" and "hub" for half-duplex links."""
    words = link.split()
    direction = next((word for word in words if word in ("up", "down")), "both directions")
    return Utilization(share, None if words[0] == "hub" else int(words[1]), direction)


def make_plan(
    config: RunConfig,
    model: PlannedModel,
    machines: Machines,
    *,
    use_all_peers: bool = False,
    chats: bool = False,
    record: bool = False,
) -> Plan:
    """Plans the run. Raises UserError if the settings cannot run on these machines, whatever their memory.

    `use_all_peers`: give every machine a stage if possible, as the setting `hub.use_all_peers` does. `chats`: the run
    trains on chats, whose tokens have flags. `record`: keep the spans of the timeline.
    """
    costs, messages = segment_costs(model, config), message_sizes(model, config, chats=chats)
    placed = _place(config, model, machines, costs, messages, use_all_peers=use_all_peers)
    chosen, actions = placed.chosen, _actions(config, len(placed.chosen))
    timeline = simulate(_step_spec(config, model, machines, placed, costs, messages, actions), record=record)
    used = {machine.name for machine in chosen}
    return Plan(
        config=config,
        model=model,
        machines=machines,
        machine_loads=_loads(config, model, placed, costs, actions),
        standbys=tuple(machine.name for machine in machines.machines if machine.name not in used),
        messages=messages,
        timeline=timeline,
        assumptions=(
            *machines.assumptions,
            *_degree_assumption(config, machines, len(chosen)),
            *_offload_assumptions(chosen, costs),
        ),
        refusal=placed.refusal,
        chats=chats,
    )


def memory_need(
    config: RunConfig, model: PlannedModel, machines: Machines, *, use_all_peers: bool = False, chats: bool = False
) -> Need:
    """Memory of the machine that lacks the most, or has the least to spare; nothing is simulated. Raises UserError as
    `make_plan`."""
    costs, messages = segment_costs(model, config), message_sizes(model, config, chats=chats)
    placed = _place(config, model, machines, costs, messages, use_all_peers=use_all_peers)
    loads = _loads(config, model, placed, costs, _actions(config, len(placed.chosen)))
    tightest = max(loads, key=lambda load: load.memory.total - load.machine.memory_nbytes)
    fits = not placed.refusal and all(load.fits for load in loads)
    return Need(nbytes=tightest.memory.total, fits=fits)


def _actions(config: RunConfig, processes: int) -> list[list[Action]]:
    schedule, extra = (
        config.parallelism.pipeline_parallel_schedule,
        config.parallelism.pipeline_parallel_extra_microbatches,
    )
    return action_lists(schedule if processes > 1 else "1F1B", processes, config.microbatches, extra=extra)


def _loads(
    config: RunConfig,
    model: PlannedModel,
    placed: "_MachinePlacement",
    costs: Sequence[SegmentCost],
    actions: list[list[Action]],
) -> tuple[MachineLoad, ...]:
    held = peak_in_flight(actions, len(placed.placement.stages))
    return tuple(
        machine_load_of(machine, placed.placement, process, config, model, costs, held)
        for process, machine in enumerate(placed.chosen)
    )


def _offload_assumptions(chosen: Sequence[Machine], costs: Sequence[SegmentCost]) -> list[str]:
    cards = [machine for machine in chosen if not machine.is_host]
    if not cards or not any(cost.host_nbytes for cost in costs):
        return []
    rates = sorted({machine.copy_bytes_per_second for machine in cards})
    said = [f"copies between cards and their hosts at {' or '.join(f'{rate / 1e9:.3g}' for rate in rates)} GB/s"]
    unknown = [machine.name for machine in cards if machine.host_memory_nbytes == inf]
    return said + ([f"enough host memory at {', '.join(unknown)} (host_memory)"] if unknown else [])


def _degree_assumption(config: RunConfig, machines: Machines, processes: int) -> list[str]:
    if machines.hub is not None or processes == 1 or config.parallelism.pipeline_parallel_degree == processes:
        return []
    return [f"the run is started with --parallelism.pipeline-parallel-degree {processes}"]


@dataclass(frozen=True, kw_only=True)
class _MachinePlacement:
    """Machines in pipeline order, and the placement of stages on them."""

    chosen: Sequence[Machine]
    placement: Placement
    refusal: str = ""
    """Error with which the hub would refuse to start the run; empty if none."""


def _place(
    config: RunConfig,
    model: PlannedModel,
    machines: Machines,
    costs: Sequence[SegmentCost],
    messages: MessageSizes,
    *,
    use_all_peers: bool,
) -> _MachinePlacement:
    parallelism, segments, there = config.parallelism, len(costs), len(machines.machines)
    layout = SCHEDULE_LAYOUTS[parallelism.pipeline_parallel_schedule]
    if machines.hub is not None:
        _refuse_without_hub(config)
        return _place_like_hub(config, model, machines, costs, messages, use_all_peers=use_all_peers)
    wanted = parallelism.pipeline_parallel_degree
    if wanted > there:
        raise UserError(
            f"parallelism.pipeline_parallel_degree is {wanted}, and there are {there} machines: add some to the file, "
            "or lower it"
        )
    count = wanted if wanted > 1 else min(there, max(1, segments // layout.stages_per_process))
    shares = parallelism.pipeline_parallel_shares
    placement = place(parallelism.pipeline_parallel_schedule, count, segments, shares)
    return _MachinePlacement(chosen=machines.machines[:count], placement=placement)


def _refuse_without_hub(config: RunConfig) -> None:
    """Raises UserError for settings that cannot be combined with a hub."""
    parallelism = config.parallelism
    if SCHEDULE_LAYOUTS[parallelism.pipeline_parallel_schedule].stages_per_process != 1:
        raise UserError(
            f"a hub gives every peer segments that follow each other, and {parallelism.pipeline_parallel_schedule} "
            "wants them from two places: set parallelism.pipeline_parallel_schedule to GPipe or 1F1B, or drop [hub]"
        )
    if parallelism.pipeline_parallel_shares is not None:
        raise UserError("a hub gives out segments by itself: leave parallelism.pipeline_parallel_shares out, or [hub]")


def _place_like_hub(
    config: RunConfig,
    model: PlannedModel,
    machines: Machines,
    costs: Sequence[SegmentCost],
    messages: MessageSizes,
    *,
    use_all_peers: bool,
) -> _MachinePlacement:
    """Calls `make_partition` with the same inputs as `swarm/hub/training_host.py` does."""
    assert machines.hub is not None
    count = len(costs)
    schedule = config.parallelism.pipeline_parallel_schedule
    most = config.microbatches if schedule == "1F1B" else None
    try:
        found = make_partition(
            needs_by_kernel(model, config),
            [machine.as_assignable() for machine in machines.machines],
            messages.traffic(config),
            hub_up_bps=machines.hub.up_bps,
            hub_down_bps=machines.hub.down_bps,
            shared_nbytes=shared_nbytes(model, config),
            max_machines=most,
            use_all_peers=use_all_peers,
        )
    except UserError as error:  # place in file order all the same, so that the plan shows how much memory is missing
        number = min(count, len(machines.machines), most or count)
        return _MachinePlacement(
            chosen=machines.machines[:number], placement=place(schedule, number, count), refusal=str(error)
        )
    by_name = {machine.name: machine for machine in machines.machines}
    stages = [segments for _, segments in found.stages]
    return _MachinePlacement(
        chosen=[by_name[name] for name, _ in found.stages],
        placement=Placement(stages, [[index] for index in range(len(stages))]),
    )


def _step_spec(
    config: RunConfig,
    model: PlannedModel,
    machines: Machines,
    placed: _MachinePlacement,
    costs: Sequence[SegmentCost],
    messages: MessageSizes,
    actions: list[list[Action]],
) -> StepSpec:
    chosen, placement = placed.chosen, placed.placement
    home = {stage: chosen[process] for process, stages in enumerate(placement.processes) for stage in stages}
    tokens = _rows(config)
    stage_times = []
    for stage, segments in enumerate(placement.stages):
        forward = sum(costs[segment].forward_flops_per_token for segment in segments) * tokens
        backward = sum(costs[segment].backward_flops_per_token for segment in segments) * tokens
        speed, more = home[stage].flops, home[stage].pass_s
        # Input gradients and weight gradients take about half of a backward pass each.
        half = backward / 2 / speed
        stage_times.append(StageTimes(forward_s=forward / speed + more, input_s=half + more, weight_s=half))
    hosts = sorted({machine.host for machine in chosen if machine.host is not None})
    numbers = {host: index for index, host in enumerate(hosts)}
    alone = len(hosts)
    tensors = 12 * model.n_layers + 4
    return StepSpec(
        actions=actions,
        stage_times=stage_times,
        links=[_link(machine) for machine in chosen],
        hub=None if machines.hub is None else _hub_link(machines.hub),
        forward_nbytes=messages.forward_nbytes,
        backward_nbytes=messages.backward_nbytes,
        labels_nbytes=messages.labels_nbytes,
        hosts=[
            alone + index if machine.host is None else numbers[machine.host] for index, machine in enumerate(chosen)
        ],
        cores={numbers[machine.host]: machine.cores for machine in chosen if machine.host and machine.cores},
        allreduce_nbytes=_ALLREDUCE_NBYTES_PER_TENSOR * tensors,
        optimiser_s=_streaming_seconds(placed, costs),
    )


def _streaming_seconds(placed: _MachinePlacement, costs: Sequence[SegmentCost]) -> list[float]:
    """Seconds in which each machine moves its offloaded state to the device and back; empty if nothing is offloaded.
    Both directions share the host's memory and are counted one after the other."""
    seconds = [
        0.0
        if machine.is_host
        else 2
        * sum(costs[segment].host_nbytes for segment in placed.placement.segments_of(process))
        / machine.copy_bytes_per_second
        for process, machine in enumerate(placed.chosen)
    ]
    return seconds if any(seconds) else []


def _hub_link(hub: Hub) -> LinkSpec:
    return LinkSpec(up_bps=hub.up_bps, down_bps=hub.down_bps, latency_s=hub.latency_s)


def _link(machine: Machine) -> LinkSpec:
    return LinkSpec(
        up_bps=machine.up_bps,
        down_bps=machine.down_bps,
        latency_s=machine.latency_s,
        duplex=machine.duplex,
        latency_per=machine.latency_per,
    )


@dataclass(frozen=True, kw_only=True)
class Cost:
    tokens: int
    hours: float
    money: float | None
    """Price of the machines that compute, in the currency of the machines file. None: no machine has a price."""


def estimate_cost(plan: Plan, tokens: int | None = None) -> Cost:
    """`tokens`: number of tokens to train on; by default those of all steps of the run."""
    count = plan.config.training.steps * plan.tokens_per_step if tokens is None else tokens
    hours = count / plan.tokens_per_second / 3600
    price = sum(machine_load.machine.price_per_hour for machine_load in plan.machine_loads)
    return Cost(tokens=count, hours=hours, money=price * hours if price else None)
