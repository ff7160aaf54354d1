"""Trains a network and looks at its ranks on the way: of what writes to the stream, and of the stream at every cut."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from benchmarks.image_models import WRITERS, AcrossTokens, walk
from benchmarks.rank.families import FAMILIES, Network, Options, Task
from benchmarks.rank.spectrum import Ranks, ranks
from thinpipe.optim import RowwiseAdamW

WARM_UP = 50


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The stream where a boundary may be, tokens x width."""

    whole: Ranks
    centred: Ranks
    """Without the mean over the tokens."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    step: int
    loss: float
    """Of unseen samples."""
    writers: dict[str, Ranks]
    cuts: list[Cut]


@dataclass(frozen=True, kw_only=True)
class History:
    """How the ranks of one network went."""

    family: str
    parameters: int
    seconds: float
    full_ranks: dict[str, int]
    """The largest that each writer could have."""
    across_tokens: list[str]
    """Those of the writers that mix tokens and not the width, and have no more ranks than there are tokens."""
    widths: list[int]
    """Of the stream at each cut."""
    moments: list[Moment]


def writers(model: Network) -> dict[str, Tensor]:
    """Matrices, out x in; a convolution has an input for every neighbour."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, WRITERS))
    return {name: module.weight.detach().flatten(1) for name, module in found}


def across_tokens(model: Network) -> list[str]:
    mixers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, AcrossTokens))
    return [name for name in writers(model) if name.startswith(mixers)]


@torch.no_grad()
def streams(model: Network, task: Task) -> tuple[list[Tensor], Tensor]:
    """The stream of unseen samples at every cut, [N, D], and their loss.

    Batch norms take the mean and variance of these samples, as in training: running ones lag far behind at first.
    """
    *states, logits = walk(model.segments, task.unseen_BW[:, :-1])
    return [state.flatten(0, 1) for state in states], task.loss(logits, task.unseen_BW)


def look(model: Network, task: Task, step: int) -> Moment:
    streams_ND, loss = streams(model, task)
    return Moment(
        step=step,
        loss=loss.item(),
        writers={name: ranks(weight) for name, weight in writers(model).items()},
        cuts=[Cut(whole=ranks(each), centred=ranks(each - each.mean(0))) for each in streams_ND],
    )


def steps_to_look_at(options: Options) -> set[int]:
    """The first, the last, and others in between at equal ratios."""
    return {0, *(round(options.steps ** (each / options.moments)) for each in range(options.moments + 1))}


def learn(model: Network, task: Task, options: Options) -> Iterator[Moment]:
    optimizer = RowwiseAdamW(model.parameters(), lr=options.lr, weight_decay=0.01)
    wanted = steps_to_look_at(options)
    for step in range(options.steps):
        if step in wanted:
            yield look(model, task, step)
        rows_BW = task.rows_at(step)
        loss = task.loss(walk(model.segments, rows_BW[:, :-1])[-1], rows_BW)
        decay = 0.1 + 0.45 * (1 + cos(pi * step / options.steps))
        optimizer.param_groups[0]["lr"] = options.lr * min(1.0, (step + 1) / WARM_UP) * decay
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    yield look(model, task, options.steps)


def follow(name: str, options: Options, data: Path, show: Callable[[Moment], None]) -> History:
    began = monotonic()
    task = FAMILIES[name].task(options, data)
    model = FAMILIES[name].build(options, task)
    moments: list[Moment] = []
    for moment in learn(model, task, options):
        moments.append(moment)
        show(moment)
    return History(
        family=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        seconds=round(monotonic() - began, 1),
        full_ranks={name: min(weight.shape) for name, weight in writers(model).items()},
        across_tokens=across_tokens(model),
        widths=[each.shape[1] for each in streams(model, task)[0]],
        moments=moments,
    )
