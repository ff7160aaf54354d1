"""Does a run fit, and what would make it fit: settings that need less memory, tried with the cost model in order of
harm. `thinpipe train`, `doctor` and `plan` give the same advice from here. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import get_args

from thinpipe.config.model import CheckpointActivations, ModelConfig
from thinpipe.config.model_family import AttentionKernel
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.units import format_bytes
from thinpipe.pipeline.placement import place
from thinpipe.planning.machine_loads import MemoryUse, peak_in_flight, process_memory
from thinpipe.planning.memory_budget import PROCESS_NBYTES, MemoryBudget
from thinpipe.planning.partition import SegmentNeeds
from thinpipe.planning.segment_costs import segment_costs, segment_needs, shared_nbytes, without_offload
from thinpipe.planning.simulation.schedule_actions import action_lists
from thinpipe.planning.stored_model import PlannedModel, StoredModel


@dataclass(frozen=True, kw_only=True)
class Need:
    """Memory that some settings need, and whether it is there."""

    nbytes: int
    """Bytes on the device that has too little, or the least to spare."""
    fits: bool


Judge = Callable[[RunConfig], Need]
"""Need of a run with these settings; raises UserError for settings that cannot run."""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One setting that needs less memory."""

    setting: str
    """The setting as it stands in a run file, with its section: training.precision = "bf16"."""
    price: str
    """What the setting costs, in words."""
    apply: Callable[[RunConfig], RunConfig]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A saving on the way to a run that fits, together with those before it."""

    saving: Saving
    config: RunConfig
    """Settings with this saving and those before it."""
    need: Need

    def in_words(self) -> str:
        end = ", which fits" if self.need.fits else ""
        return f"{self.saving.setting} ({self.saving.price}): {format_bytes(self.need.nbytes)}{end}"


def ways_to_fit(config: RunConfig, judge: Judge) -> list[Step]:
    """The least harmful settings with which the run fits, each with the need of all so far; the last one fits. If not
    even all of them suffice, all that save something, and the last one does not fit."""
    chosen: list[Saving] = []
    steps: list[Step] = []
    for kind in _KINDS:
        here = steps[-1] if steps else None
        levels = [step for saving in kind(config) if (step := _try(saving, here, config, judge)) is not None]
        if not levels:
            continue
        best = next((step for step in levels if step.need.fits), min(levels, key=lambda step: step.need.nbytes))
        steps.append(best)
        if best.need.fits:
            break
    chosen = [step.saving for step in steps]
    if not steps or not steps[-1].need.fits:
        return steps
    for saving in reversed(chosen[:-1]):  # what the last saving has made needless
        without = [each for each in chosen if each is not saving]
        shorter = _replay(without, config, judge)
        if shorter and shorter[-1].need.fits:
            chosen, steps = without, shorter
    return steps


def _try(saving: Saving, before: Step | None, config: RunConfig, judge: Judge) -> Step | None:
    """None if the setting is invalid here, or saves nothing."""
    try:
        changed = saving.apply(before.config if before else config)
        need, had = judge(changed), before.need if before else judge(config)
    except UserError:
        return None
    return Step(saving=saving, config=changed, need=need) if need.nbytes < had.nbytes else None


def _replay(savings: Sequence[Saving], config: RunConfig, judge: Judge) -> list[Step]:
    """Steps of these savings one after the other; empty if one of them changes nothing."""
    steps: list[Step] = []
    for saving in savings:
        step = _try(saving, steps[-1] if steps else None, config, judge)
        if step is None:
            return []
        steps.append(step)
    return steps


def _smaller_microbatches(config: RunConfig) -> Iterator[Saving]:
    batch = config.training.global_batch_size
    for size in range(config.microbatch_size // 2, 0, -1):
        if batch % size == 0:
            yield Saving(
                setting=f"parallelism.pipeline_parallel_microbatch_size = {size}",
                price="more and shorter passes",
                apply=partial(_with_microbatch_size, size),
            )


def _with_microbatch_size(size: int, config: RunConfig) -> RunConfig:
    return replace(config, parallelism=replace(config.parallelism, pipeline_parallel_microbatch_size=size))


def _checkpointing(config: RunConfig) -> Iterator[Saving]:
    levels = get_args(CheckpointActivations)
    for level in levels[levels.index(config.execution.checkpoint_activations) + 1 :]:
        yield Saving(
            setting=f'execution.checkpoint_activations = "{level}"',
            price="a third more time",
            apply=partial(_with_checkpointing, level),
        )


def _with_checkpointing(level: CheckpointActivations, config: RunConfig) -> RunConfig:
    return replace(config, execution=replace(config.execution, checkpoint_activations=level))


def _offload(config: RunConfig) -> Iterator[Saving]:
    if config.training.offload == "none":
        yield Saving(
            setting='training.offload = "optimizer"',
            price="the update waits for copies from and to host memory",
            apply=lambda run: replace(run, training=replace(run.training, offload="optimizer")),
        )


def _narrow_weights(config: RunConfig) -> Iterator[Saving]:
    if config.training.precision != "bf16":
        yield Saving(
            setting='training.precision = "bf16"',
            price="rounded weights and moments: other numbers",
            apply=lambda run: replace(run, training=replace(run.training, precision="bf16")),
        )


_KINDS: tuple[Callable[[RunConfig], Iterator[Saving]], ...] = (
    _smaller_microbatches,
    _checkpointing,
    _offload,
    _narrow_weights,
)
"""Kinds of savings in order of harm. Each yields its levels, the mildest first."""


@dataclass(frozen=True, kw_only=True)
class LocalFit:
    """Processes of a run that compute on one device of this machine, and the memory there."""

    model: PlannedModel
    budget: MemoryBudget
    ranks: tuple[int, ...]
    """Processes of the run that share the device, by their rank in the pipeline."""
    attention: AttentionKernel = "fused"
    """Kernel of attention on the device."""
    starting: int = 0
    """Number of these processes that are not started yet, and take memory beside their tensors."""

    def memory(self, config: RunConfig) -> MemoryUse:
        """Peak memory of all these processes together. Raises UserError for settings that cannot run."""
        uses = memory_of_processes(config, self.model, self.budget, self.attention)
        mine = [uses[rank] for rank in self.ranks]
        kinds = ("weights", "gradients", "optimiser", "activations", "frozen", "tables", "host")
        overhead = self.starting * self.budget.process_nbytes
        return MemoryUse(**{kind: sum(getattr(use, kind) for use in mine) for kind in kinds}, overhead=overhead)

    def judge(self, config: RunConfig) -> Need:
        use, host = self.memory(config), self.budget.host_free_nbytes
        fits = use.total <= self.budget.usable_nbytes and (host is None or use.host <= host)
        return Need(nbytes=use.total, fits=fits)

    def describe_need(self, config: RunConfig) -> str:
        """How much is needed and how much there is, with the parts of it."""
        use, budget = self.memory(config), self.budget
        parts = {
            "weights": use.weights,
            "gradients": use.gradients,
            "optimiser state": use.optimiser,
            "activations": use.activations,
            "frozen weights" if isinstance(self.model, StoredModel) else "frozen tables": use.frozen,
            "Python and torch": use.overhead,
        }
        if budget.host_free_nbytes is not None and use.host > budget.host_free_nbytes:
            there = format_bytes(budget.host_free_nbytes)
            return (
                f"the run needs {format_bytes(use.host)} of host memory for offloaded optimiser state, and {there} are "
                f"free; on {budget.place} it needs {format_bytes(use.total)}"
            )
        listed = ", ".join(
            f"{kind} {format_bytes(nbytes)}" for kind, nbytes in parts.items() if nbytes > use.total / 100
        )
        processes = f" for {len(self.ranks)} processes" if len(self.ranks) > 1 else ""
        lost = f", less {budget.fragmentation_share:.0%} for fragmentation" if budget.fragmentation_share else ""
        return (
            f"the run needs {format_bytes(use.total)} of memory{processes} on {budget.place}, where "
            f"{format_bytes(budget.usable_nbytes)} can be used ({format_bytes(budget.free_nbytes)} are free{lost}): "
            f"{listed}"
        )

    def advice(self, config: RunConfig) -> list[str]:
        """What would make the run fit, one line for each change of settings, and the number of machines."""
        steps = ways_to_fit(config, self.judge)
        lines = [f"{'and ' if index else ''}{step.in_words()}" for index, step in enumerate(steps)]
        enough = bool(steps) and steps[-1].need.fits
        if steps and not enough:
            lines[-1] += ", still too much"
        if machines := machines_needed(config, self.model, self.budget, self.attention):
            lines.append(f"{'or ' if lines else ''}{_on_machines(*machines)} with the settings as they are")
        if steps and not enough:
            machines = machines_needed(steps[-1].config, self.model, self.budget, self.attention)
            lines += [f"or {_on_machines(*machines)} with all of these settings"] if machines else []
        return lines or ["a smaller model, or a machine with more memory"]


def memory_of_processes(
    config: RunConfig, model: PlannedModel, budget: MemoryBudget, attention: AttentionKernel = "fused"
) -> list[MemoryUse]:
    """Peak memory of every process of a run, in pipeline order, if each has a device like that of `budget`; without
    what processes take of the device beside tensors."""
    config = without_offload(config) if budget.is_host else config
    section, costs = config.parallelism, segment_costs(model, config, attention)
    degree, schedule = section.pipeline_parallel_degree, section.pipeline_parallel_schedule
    placement = place(schedule, degree, len(costs), section.pipeline_parallel_shares)
    extra = section.pipeline_parallel_extra_microbatches
    held = peak_in_flight(action_lists(schedule, degree, config.microbatches, extra=extra), len(placement.stages))
    return [
        process_memory(
            placement,
            process,
            config,
            model,
            costs,
            held,
            in_host_memory=budget.is_host,
            activation_factor=budget.activation_factor,
        )
        for process in range(degree)
    ]


def machines_needed(
    config: RunConfig, model: PlannedModel, budget: MemoryBudget, attention: AttentionKernel = "fused"
) -> tuple[int, int] | None:
    """Smallest number of machines with this much memory and this kernel that hold the model, cut between any two
    blocks, and the bytes of the fullest device. None if a single block is too large, or if the batch has fewer
    sequences than machines."""
    boundaries = tuple(range(1, model.n_layers))
    finest: PlannedModel = (
        replace(model, boundaries=boundaries, tied=False)
        if isinstance(model, ModelConfig)
        else replace(model, boundaries=boundaries)
    )
    costs, shared = segment_costs(finest, config, attention), shared_nbytes(finest, config)
    for number in range(2, min(model.n_layers, config.training.global_batch_size) + 1):
        needs = segment_needs(costs, _with_microbatches(config, number), processes=number)
        filled = _fill(needs, budget, budget.usable_nbytes - shared)
        if filled is not None and len(filled) <= number:
            return number, max(filled) + shared
    return None


def _on_machines(number: int, nbytes: int) -> str:
    return f"{number} machines with as much memory, {format_bytes(nbytes)} on the fullest,"


def _with_microbatches(config: RunConfig, number: int) -> RunConfig:
    """Settings with at least `number` micro-batches, which 1F1B needs for as many machines."""
    batch = config.training.global_batch_size
    size = next(size for size in range(config.microbatch_size, 0, -1) if batch % size == 0 and batch // size >= number)
    return _with_microbatch_size(size, config)


def _fill(needs: Sequence[SegmentNeeds], budget: MemoryBudget, free_nbytes: int) -> list[int] | None:
    """Bytes of each device if every machine takes as many consecutive blocks as it can; None if a block is too
    large."""
    host_nbytes = inf if budget.host_free_nbytes is None else budget.host_free_nbytes - PROCESS_NBYTES
    filled, host = [0], 0
    for need in needs:
        nbytes = budget.device_nbytes(need)
        if nbytes > free_nbytes or need.host_nbytes > host_nbytes:
            return None
        if filled[-1] + nbytes > free_nbytes or host + need.host_nbytes > host_nbytes:
            filled.append(0)
            host = 0
        filled[-1] += nbytes
        host += need.host_nbytes
    return filled
