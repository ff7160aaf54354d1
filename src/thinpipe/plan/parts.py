"""What one machine of a plan has: its segments, and the memory that they need at the worst moment of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from thinpipe.models.config import ModelConfig
from thinpipe.pipeline.placement import Placement
from thinpipe.plan.actions import Action, Kind
from thinpipe.plan.machines import Machine
from thinpipe.plan.needs import SegmentNeed, shared_nbytes
from thinpipe.train.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one machine at the worst moment of a step, by kind."""

    weights: int
    """Trainable ones, token tables and anchors among them."""
    gradients: int
    optimiser: int
    activations: int
    """What all micro-batches under way keep, and what comes beside it while a segment computes."""
    frozen: int
    """Frozen token tables and the basis."""
    overhead: int
    """Python, torch and its libraries."""
    tables: int
    """Of the weights: token tables and anchors."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimiser + self.activations + self.frozen + self.overhead


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one machine has."""

    machine: Machine
    segments: tuple[int, ...]
    blocks: int
    parameters: int
    memory: Memory

    @property
    def missing_nbytes(self) -> int:
        """More than the machine has; 0 if it fits."""
        return max(0, self.memory.total - self.machine.memory_nbytes)


def held_at_once(actions: Sequence[Sequence[Action]], stages: int) -> list[int]:
    """The most micro-batches whose activations each stage keeps at once."""
    most = [0] * stages
    for listed in actions:
        held: dict[int, int] = {}
        for action in listed:
            change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT: -1, Kind.INPUT: 0}[action.kind]
            held[action.stage] = held.get(action.stage, 0) + change
            most[action.stage] = max(most[action.stage], held[action.stage])
    return most


def part_of(
    machine: Machine,
    placement: Placement,
    process: int,
    config: RunConfig,
    model: ModelConfig,
    needs: Sequence[SegmentNeed],
    held: Sequence[int],
) -> Part:
    stages = placement.processes[process]
    segments = [segment for stage in stages for segment in placement.stages[stage]]
    mine = [needs[segment] for segment in segments]
    kept = sum(held[stage] * needs[segment].kept_nbytes for stage in stages for segment in placement.stages[stage])
    activations = kept + max(need.at_work_nbytes for need in mine)
    gradients = sum(need.gradients_nbytes for need in mine)
    if config.microbatches == 1:  # gradients come as activations go
        activations = max(0, activations - gradients)
    memory = Memory(
        weights=sum(need.weights_nbytes for need in mine),
        gradients=gradients,
        optimiser=sum(need.optimiser_nbytes for need in mine),
        activations=activations,
        frozen=shared_nbytes(model, config),
        overhead=machine.overhead_nbytes,
        tables=sum(need.tables_nbytes for need in mine),
    )
    return Part(
        machine=machine,
        segments=tuple(segments),
        blocks=sum(len(model.segments[segment]) for segment in segments),
        parameters=sum(need.parameters for need in mine),
        memory=memory,
    )
