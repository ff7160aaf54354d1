"""Looks for the cut, the schedule and the micro-batches that are fastest on given machines, and fit.

The cut: as many segments as machines, with blocks in proportion to what machines can do. Moving cuts changes the
model unless nothing is lost at them, so the result says which cut it has in mind.
"""

import time
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

SECONDS = 1.2
"""When so much time has passed, the best so far is taken; what was not tried is said."""
_EXTRAS = (0, 1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Found:
    best: Draft
    tried: int
    left: int
    """Candidates for which there was no time."""


def search(config: RunConfig, model: ModelConfig, machines: Machines, *, everyone: bool = False) -> Found:
    """Raises UserError when nothing that was tried fits."""
    started, best, tried, last_error = time.monotonic(), None, 0, "nothing fits"
    candidates = list(_candidates(config, model, machines))
    for settings, shape in candidates:
        if time.monotonic() - started > SECONDS and best is not None:
            break
        tried += 1
        try:
            plan = draft(settings, shape, machines, everyone=everyone)
        except UserError as error:
            last_error = str(error)
            continue
        if plan.fits and (best is None or plan.tokens_per_second > best.tokens_per_second):
            best = plan
    if best is None:
        raise UserError(
            f"no cut, schedule or micro-batch that was tried fits on these machines ({last_error}): add a machine, or "
            "set execution.checkpoint_activations = true"
        )
    return Found(best=best, tried=tried, left=len(candidates) - tried)


def _candidates(config: RunConfig, model: ModelConfig, machines: Machines) -> Iterator[tuple[RunConfig, ModelConfig]]:
    """The cheapest to simulate first: large micro-batches."""
    shapes = [model, *_cuts(config, model, machines)]
    batch = config.training.global_batch_size
    for size in (size for size in range(batch, 0, -1) if batch % size == 0):
        for schedule, layout in LAYOUTS.items():
            for extra in _EXTRAS if layout.takes_extra else (0,):
                section = replace(
                    config.parallelism,
                    pipeline_parallel_schedule=schedule,  # type: ignore[arg-type]
                    pipeline_parallel_microbatch_size=size,
                    pipeline_parallel_extra_microbatches=extra,
                    pipeline_parallel_shares=None,
                )
                try:
                    settings = replace(config, parallelism=section)
                except UserError:
                    continue
                for shape in shapes:
                    yield settings, shape


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
