"""Peak memory of a process during a step, by kind, and the load of one machine in a plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.config.run import RunConfig
from thinpipe.pipeline.placement import Placement
from thinpipe.planning.machines import Machine
from thinpipe.planning.memory_budget import PROCESS_NBYTES
from thinpipe.planning.segment_cost import SegmentCost
from thinpipe.planning.segment_costs import (
    peak_extra_nbytes,
    segment_costs,
    shared_nbytes,
    update_nbytes,
    without_offload,
)
from thinpipe.planning.simulation.schedule_actions import Action, PassKind
from thinpipe.planning.stored_model import PlannedModel


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Peak memory of one machine during a step, in bytes by kind."""

    weights: int
    """Trainable weights, token tables and token priors included."""
    gradients: int
    optimiser: int
    activations: int
    """Activations saved for all in-flight micro-batches, plus the temporary tensors of the segment that computes; or
    the temporary tensors of the update, if they are larger."""
    frozen: int
    """Frozen token tables and the basis; the frozen weights of a model with adapters."""
    overhead: int
    """Context, libraries and fragmentation; Python and torch on a CPU."""
    tables: int
    """Part of `weights`: token tables and token priors."""
    host: int = 0
    """Memory of the host beside that of the device: offloaded optimiser state, Python and torch."""

    @property
    def total(self) -> int:
        """Bytes of the device."""
        return self.weights + self.gradients + self.optimiser + self.activations + self.frozen + self.overhead


@dataclass(frozen=True, kw_only=True)
class MachineLoad:
    """Segments of one machine and the memory they cost."""

    machine: Machine
    segments: tuple[int, ...]
    blocks: int
    """Number of transformer blocks."""
    parameters: int
    """Number of trainable parameters."""
    memory: MemoryUse
    download_nbytes: int = 0
    """Part of a published base that the machine downloads once: its own layers."""
    commit_nbytes: int = 0
    """Bytes that the machine sends with every checkpoint: trained weights and their moments."""

    @property
    def missing_nbytes(self) -> int:
        """Bytes by which the peak exceeds the machine's memory; 0 if it fits."""
        return max(0, self.memory.total - self.machine.memory_nbytes)

    @property
    def missing_host_nbytes(self) -> int:
        """Bytes by which the host's memory is too small for what is offloaded; 0 if it fits."""
        available = self.machine.host_memory_nbytes
        return 0 if available is None else int(max(0, self.memory.host - available))

    @property
    def fits(self) -> bool:
        return not self.missing_nbytes and not self.missing_host_nbytes


def peak_in_flight(actions: Sequence[Sequence[Action]], stages: int) -> list[int]:
    """Peak number of micro-batches whose activations each stage holds at once."""
    peak = [0] * stages
    for listed in actions:
        held: dict[int, int] = {}
        for action in listed:
            change = {PassKind.FORWARD: 1, PassKind.BACKWARD: -1, PassKind.WEIGHT: -1, PassKind.INPUT: 0}[action.kind]
            held[action.stage] = held.get(action.stage, 0) + change
            peak[action.stage] = max(peak[action.stage], held[action.stage])
    return peak


def process_memory(
    placement: Placement,
    process: int,
    config: RunConfig,
    model: PlannedModel,
    costs: Sequence[SegmentCost],
    held: Sequence[int],
    *,
    in_host_memory: bool,
    overhead_nbytes: int = 0,
    activation_factor: float = 1.0,
) -> MemoryUse:
    """Peak memory of `process`. `held`: peak in-flight micro-batches of each stage; `in_host_memory`: the device
    computes in the host's memory, and `costs` are those without offload; `overhead_nbytes`: bytes beside tensors;
    `activation_factor`: measured activations divided by predicted ones."""
    stages = placement.processes[process]
    mine = [costs[segment] for segment in placement.segments_of(process)]
    saved_nbytes = sum(
        held[stage] * costs[segment].activation_nbytes for stage in stages for segment in placement.stages[stage]
    )
    in_flight = max(held[stage] for stage in stages)
    activations = int(activation_factor * (saved_nbytes + peak_extra_nbytes(mine, in_flight)))
    activations += sum(cost.copies_nbytes for cost in mine)
    gradients = sum(cost.gradients_nbytes for cost in mine)
    if config.microbatches == 1:  # gradients are allocated while activations are freed
        activations = max(0, activations - gradients)
    assert not (in_host_memory and any(cost.host_nbytes for cost in mine))
    update = 0 if in_host_memory else update_nbytes(mine)
    return MemoryUse(
        weights=sum(cost.device_weights_nbytes for cost in mine),
        gradients=gradients,
        optimiser=sum(cost.optimiser_nbytes - cost.offloaded_nbytes for cost in mine),
        activations=max(activations, update),  # activations are gone when weights are updated
        host=0 if in_host_memory else sum(cost.host_nbytes for cost in mine) + PROCESS_NBYTES,
        frozen=shared_nbytes(model, config) + sum(cost.frozen_nbytes for cost in mine),
        overhead=overhead_nbytes,
        tables=sum(cost.tables_nbytes for cost in mine),
    )


def machine_load_of(
    machine: Machine,
    placement: Placement,
    process: int,
    config: RunConfig,
    model: PlannedModel,
    costs: Sequence[SegmentCost],
    held: Sequence[int],
) -> MachineLoad:
    """Load of the machine that runs `process`. `held`: peak in-flight micro-batches of each stage."""
    if machine.is_host and config.training.offload != "none":  # moves nothing there
        config = without_offload(config)
        costs = segment_costs(model, config, machine.attention)
    elif machine.attention != "fused":
        costs = segment_costs(model, config, machine.attention)
    segments = placement.segments_of(process)
    return MachineLoad(
        machine=machine,
        segments=tuple(segments),
        blocks=sum(len(model.segments[segment]) for segment in segments),
        parameters=sum(costs[segment].parameters for segment in segments),
        download_nbytes=sum(costs[segment].download_nbytes for segment in segments),
        commit_nbytes=sum(costs[segment].state_nbytes for segment in segments),
        memory=process_memory(
            placement,
            process,
            config,
            model,
            costs,
            held,
            in_host_memory=machine.is_host,
            overhead_nbytes=machine.overhead_nbytes,
            activation_factor=machine.activation_factor,
        ),
    )
