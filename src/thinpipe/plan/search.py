"""Looks for the cut, the schedule and the micro-batches that are fastest on given machines, and fit.

It starts from the run's own settings and takes, again and again, the best of all single changes, until none helps: a
climb, which may end on a hill that is not the highest. The cut that is tried has a segment for each machine, with
blocks in proportion to what machines can do. Moving cuts changes the model unless nothing is lost at them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from thinpipe.core.errors import UserError
from thinpipe.models.config import ModelConfig
from thinpipe.pipeline.placement import LAYOUTS
from thinpipe.plan.draft import Draft, draft
from thinpipe.plan.machines import Machine, Machines
from thinpipe.plan.needs import segment_needs
from thinpipe.train.config import RunConfig

MOST_PASSES, MOST_DRAFTS = 24_000, 60
"""Simulated: then the best so far is taken, and that it may not be the end is said. About a second."""

Choice = tuple[RunConfig, ModelConfig]


@dataclass(frozen=True, kw_only=True)
class Found:
    best: Draft
    tried: int
    at_the_end: bool
    """Of its climb: nothing that is one change away is faster."""


def search(config: RunConfig, model: ModelConfig, machines: Machines, *, everyone: bool = False) -> Found:
    """Never slower than the run's own settings, if these fit. Raises UserError when nothing that was tried fits."""
    climb = _Climb(machines, everyone)
    shapes = [model, *_cuts(config, model, machines)]
    climb.look_at((config, shape) for shape in shapes)
    at_the_end = False
    while not (at_the_end or climb.is_late):
        before, here = climb.best, climb.best.config if climb.best else config
        near = _one_change_away(here, with_hub=machines.hub is not None)
        climb.look_at((changed, shape) for changed in near for shape in shapes)
        at_the_end = climb.best is before and not climb.is_late
        if climb.best is None:
            break
    if climb.best is None:
        raise UserError(
            f"no cut, schedule or micro-batch that was tried fits on these machines ({climb.problem}): add a machine, "
            "or set execution.checkpoint_activations = true"
        )
    return Found(best=climb.best, tried=len(climb.seen), at_the_end=at_the_end)


class _Climb:
    def __init__(self, machines: Machines, everyone: bool) -> None:
        self.machines, self.everyone = machines, everyone
        self.best: Draft | None = None
        self.problem = "nothing fits"
        self.seen: set[Choice] = set()
        self._passes = 0

    @property
    def is_late(self) -> bool:
        return self._passes > MOST_PASSES or len(self.seen) >= MOST_DRAFTS

    def look_at(self, choices: Iterator[Choice]) -> None:
        for choice in choices:
            if choice in self.seen:
                continue
            if self.is_late:
                return
            self.seen.add(choice)
            self._passes += 2 * choice[0].microbatches * len(self.machines.machines)
            try:
                plan = draft(*choice, self.machines, everyone=self.everyone)
            except UserError as error:
                self.problem = str(error)
                continue
            if plan.fits and (self.best is None or plan.tokens_per_second > self.best.tokens_per_second):
                self.best = plan


def _one_change_away(config: RunConfig, *, with_hub: bool) -> Iterator[RunConfig]:
    """A hub gives each machine one stage."""
    section, size = config.parallelism, config.microbatch_size
    extra = section.pipeline_parallel_extra_microbatches
    for schedule, layout in LAYOUTS.items():
        if with_hub and layout.stages_per_process != 1:
            continue
        for more in sorted({0, max(0, extra - 1), extra, extra + 1, 2 * extra}) if layout.takes_extra else (0,):
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


def _cuts(config: RunConfig, model: ModelConfig, machines: Machines) -> list[ModelConfig]:
    """One segment for each machine."""
    count = min(len(machines.machines), model.n_layers)
    if count < 2 or model.tied:
        return []
    boundaries = balanced_cut(config, model, machines.machines[:count])
    return [] if boundaries == model.boundaries else [replace(model, boundaries=boundaries)]


def balanced_cut(config: RunConfig, model: ModelConfig, machines: tuple[Machine, ...]) -> tuple[int, ...]:
    """Cuts that give every machine work in proportion to its speed, at least one block each."""
    finest = replace(model, boundaries=tuple(range(1, model.n_layers)))
    flops = [need.forward_flops_per_token + need.backward_flops_per_token for need in segment_needs(finest, config)]
    done = list(accumulate(flops, initial=0.0))
    speeds = list(accumulate(machine.flops for machine in machines))
    cuts: list[int] = []
    for index, speed in enumerate(speeds[:-1]):
        goal = done[-1] * speed / speeds[-1]
        least, most = (cuts[-1] if cuts else 0) + 1, model.n_layers - (len(machines) - 1 - index)
        cuts.append(min(range(least, most + 1), key=lambda cut: abs(done[cut] - goal)))
    return tuple(cuts)
