"""Search for the fastest boundaries, schedule and micro-batch settings that fit on given machines.

Hill climbing from the run's own settings: take the best single change until none helps, which may end in a local
optimum. Beside the run's own boundaries, one cut is tried: a segment per machine, with blocks in proportion to the
machines' FLOP/s. Other boundaries are another model unless the boundary method is lossless.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.pipeline.placement import SCHEDULE_LAYOUTS
from thinpipe.planning.machines import Machine, Machines
from thinpipe.planning.planner import Plan, make_plan
from thinpipe.planning.segment_costs import segment_costs
from thinpipe.planning.stored_model import PlannedModel

MAX_PASSES, MAX_PLANS = 24_000, 60
"""Budget of the search in simulated passes and in plans, about a second; then the best plan so far is returned with
`converged` false."""

Choice = tuple[RunConfig, PlannedModel]


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    best: Plan
    tried: int
    """Number of settings evaluated."""
    converged: bool
    """True if no single change of `best` is faster; False if the budget ran out."""


def search(
    config: RunConfig, model: PlannedModel, machines: Machines, *, use_all_peers: bool = False, chats: bool = False
) -> SearchResult:
    """Runs the search. The result is never slower than the run's own settings if those fit. Raises UserError if nothing
    that was tried fits."""
    climb = _HillClimb(machines, use_all_peers, chats)
    shapes = [model, *_cuts(config, model, machines)]
    climb.evaluate((_with_cut(config, shape), shape) for shape in shapes)
    converged = False
    while not (converged or climb.out_of_budget):
        before, here = climb.best, climb.best.config if climb.best else config
        near = _one_change_away(here, with_hub=machines.hub is not None)
        climb.evaluate((_with_cut(changed, shape), shape) for changed in near for shape in shapes)
        converged = climb.best is before and not climb.out_of_budget
        if climb.best is None:
            break
    if climb.best is None:
        raise UserError(
            f"no cut, schedule or micro-batch that was tried fits on these machines ({climb.problem}): add a machine, "
            'or set execution.checkpoint_activations = "block" or "segment"'
        )
    return SearchResult(best=climb.best, tried=len(climb.seen), converged=converged)


class _HillClimb:
    """Best plan so far, and the budget used."""

    def __init__(self, machines: Machines, use_all_peers: bool, chats: bool) -> None:
        self.machines, self.use_all_peers, self.chats = machines, use_all_peers, chats
        self.best: Plan | None = None
        self.problem = "nothing fits"
        self.seen: set[Choice] = set()
        self._passes = 0

    @property
    def out_of_budget(self) -> bool:
        return self._passes > MAX_PASSES or len(self.seen) >= MAX_PLANS

    def evaluate(self, choices: Iterator[Choice]) -> None:
        """Plans every choice not seen before, until the budget is used up."""
        for choice in choices:
            if choice in self.seen:
                continue
            if self.out_of_budget:
                return
            self.seen.add(choice)
            self._passes += 2 * choice[0].microbatches * len(self.machines.machines)
            try:
                plan = make_plan(*choice, self.machines, use_all_peers=self.use_all_peers, chats=self.chats)
            except UserError as error:
                self.problem = str(error)
                continue
            if plan.fits and (self.best is None or plan.tokens_per_second > self.best.tokens_per_second):
                self.best = plan


def _one_change_away(config: RunConfig, *, with_hub: bool) -> Iterator[RunConfig]:
    """Settings with another schedule, number of extra micro-batches or micro-batch size. With a hub, which gives each
    machine one stage, schedules with several stages per process are left out."""
    section, size = config.parallelism, config.microbatch_size
    extra = section.pipeline_parallel_extra_microbatches
    for schedule, layout in SCHEDULE_LAYOUTS.items():
        if with_hub and layout.stages_per_process != 1:
            continue
        for more in (
            sorted({0, max(0, extra - 1), extra, extra + 1, 2 * extra}) if layout.allows_extra_microbatches else (0,)
        ):
            for new_size in (size, 2 * size, size // 2):
                try:
                    yield replace(
                        config,
                        parallelism=replace(
                            section,
                            pipeline_parallel_schedule=schedule,  # type: ignore[arg-type]
                            pipeline_parallel_microbatch_size=new_size,
                            pipeline_parallel_extra_microbatches=more,
                            pipeline_parallel_shares=None,
                        ),
                    )
                except (UserError, ZeroDivisionError):
                    continue


def _with_cut(config: RunConfig, model: PlannedModel) -> RunConfig:
    """Settings as a run has them with the model's boundaries: whether a published model is cut decides what it
    sends."""
    if config.model.hf is None:
        return config
    return replace(config, model=replace(config.model, boundaries=model.boundaries or None))


def _cuts(config: RunConfig, model: PlannedModel, machines: Machines) -> list[PlannedModel]:
    """The model cut into one segment per machine, unless that is its cut already or the model cannot be cut."""
    count = min(len(machines.machines), model.n_layers)
    if count < 2 or getattr(model, "tied", False):
        return []
    boundaries = balanced_cut(config, model, machines.machines[:count])
    return [] if boundaries == model.boundaries else [replace(model, boundaries=boundaries)]


def balanced_cut(config: RunConfig, model: PlannedModel, machines: tuple[Machine, ...]) -> tuple[int, ...]:
    """Boundaries that give every machine FLOPs in proportion to its speed, and at least one block."""
    finest = replace(model, boundaries=tuple(range(1, model.n_layers)))
    flops = [cost.flops_per_token for cost in segment_costs(finest, config)]
    done = list(accumulate(flops, initial=0.0))
    speeds = list(accumulate(machine.flops for machine in machines))
    cuts: list[int] = []
    for index, speed in enumerate(speeds[:-1]):
        goal = done[-1] * speed / speeds[-1]
        first_cut, last_cut = (cuts[-1] if cuts else 0) + 1, model.n_layers - (len(machines) - 1 - index)
        cuts.append(min(range(first_cut, last_cut + 1), key=lambda cut: abs(done[cut] - goal)))
    return tuple(cuts)
