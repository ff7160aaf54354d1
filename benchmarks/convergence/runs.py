"""Which runs the study has, by priority: first what the others depend on, then one question after the other.

Learning rates of all but the first question are the best of the first (`LR`), which is why that one comes first.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.convergence.study import Study
from thinpipe.boundary.settings import BoundarySection, Compression
from thinpipe.models.config import SubspaceConfig
from thinpipe.train.config import BasisSection

SHORT, LONG = 524_288, 4_194_304
TOKENS_PER_CORE_SECOND = 3_000.0
"""Roughly, for the estimate of core-hours: one thread, while another run has the other core."""

LR = {"dense": 3e-3, "row": 3e-3, "element": 6e-3, "topk": 3e-3, "quantise": 3e-3, "lowrank": 3e-3}
"""The best at SHORT tokens, seed 0 and 16 times fewer bytes (quantise: 8)."""

SEEDS = (0, 1, 2)


def core_hours(study: Study) -> float:
    return study.tokens / TOKENS_PER_CORE_SECOND / 3600


def topk(keep: float, *, reuse: bool = True, memory: str = "none") -> BoundarySection:
    states = Compression(kind="topk", keep=keep, memory=memory)  # type: ignore[arg-type]
    gradients = Compression(kind="topk", reuse_mask=True) if reuse else Compression(kind="topk", keep=keep)
    return BoundarySection(states=states, gradients=gradients)


def quantise(bits: int) -> BoundarySection:
    leg = Compression(kind="quantise", bits=bits, tile=128, rotate=True)
    return BoundarySection(states=leg, gradients=leg)


def lowrank(rank: int) -> BoundarySection:
    leg = Compression(kind="lowrank", rank=rank)
    return BoundarySection(states=leg, gradients=leg)


TOPK = {8: topk(0.085), 16: topk(0.0425), 32: topk(0.0212)}
LOWRANK = {8: lowrank(28), 16: lowrank(14), 32: lowrank(7)}
WIDTH = {8: 32, 16: 16, 32: 8}
"""By how many times fewer bytes than dense bf16."""

BASE = Study(question="", name="dense", priority=0, tokens=SHORT, lr=LR["dense"])
ROW = replace(BASE, name="subspace 16x", width=WIDTH[16], lr=LR["row"])
ELEMENT = replace(ROW, name="subspace 16x plain AdamW", second_moment="element", lr=LR["element"])


def learning_rates() -> Iterator[Study]:
    """d/k is 16 here, its root 4: the range for plain AdamW on coordinates reaches 4 times higher."""
    base = replace(BASE, question="learning rate")
    yield replace(base, lr=7.5e-4)
    for lr in (1.5e-3, 3e-3, 6e-3):
        yield replace(base, lr=lr)
        yield replace(base, name="topk 16x", boundary=TOPK[16], lr=lr, priority=1)
        yield replace(base, name="quantise 2 bit", boundary=quantise(2), lr=lr, priority=1)
        yield replace(base, name="lowrank 16x", boundary=LOWRANK[16], lr=lr, priority=1)
    for lr in (1.5e-3, 3e-3, 6e-3, 1.2e-2):
        yield replace(ROW, question=base.question, lr=lr)
        yield replace(ELEMENT, question=base.question, lr=2 * lr)


def pieces() -> Iterator[Study]:
    """The paper's parts, one by one, at 16 times fewer bytes."""
    base = replace(ROW, question="pieces", priority=2)
    for interval in (50, 200):
        yield replace(base, name=f"basis every {interval}", basis=BasisSection(interval=interval))
    for size in (0.1, 10.0):
        yield replace(base, name=f"basis every 50, step size {size:g}", basis=BasisSection(interval=50, step_size=size))
    plain = replace(ELEMENT, question=base.question, priority=2)
    yield replace(plain, name="plain AdamW, basis every 50", basis=BasisSection(interval=50))
    yield replace(base, name="Gaussian table", subspace=SubspaceConfig(fixed="gaussian"))
    for std in (0.002, 0.2):
        yield replace(base, name=f"table of {std:g}", subspace=SubspaceConfig(fixed_std=std))
    yield replace(base, name="last segment confined", subspace=SubspaceConfig(free_last=False))
    yield replace(base, name="same trainable count", matched=True)
    yield replace(plain, name="plain AdamW, same trainable count", matched=True)


def ratios() -> Iterator[Study]:
    """Every method at the same bytes; those at 16 times were runs of the first question."""
    base = replace(BASE, question="bytes", priority=3)
    for ratio in (8, 32):
        for kind in (ROW, ELEMENT):
            name = kind.name.replace("16x", f"{ratio}x")
            yield replace(kind, question=base.question, priority=3, name=name, width=WIDTH[ratio])
        yield replace(base, name=f"topk {ratio}x", boundary=TOPK[ratio], lr=LR["topk"])
        yield replace(base, name=f"lowrank {ratio}x", boundary=LOWRANK[ratio], lr=LR["lowrank"])
    for bits in (4, 8):
        yield replace(base, name=f"quantise {bits} bit", boundary=quantise(bits), lr=LR["quantise"])
    yield replace(base, name="topk 8x, own mask backward", boundary=topk(0.065, reuse=False), lr=LR["topk"])
    for memory in ("ef", "ef21"):
        yield replace(base, name=f"topk 8x, {memory}", boundary=topk(0.085, memory=memory), lr=LR["topk"])


def depths() -> Iterator[Study]:
    """Do errors pile up with the number of boundaries? Three were runs of the questions above."""
    base = replace(BASE, question="boundaries", priority=4)
    for cuts in ((4,), (1, 2, 3, 4, 5, 6, 7)):
        count = f"{len(cuts)} boundaries" if len(cuts) > 1 else "1 boundary"
        yield replace(base, name=f"topk 16x, {count}", boundary=TOPK[16], lr=LR["topk"], cuts=cuts)
        yield replace(base, name=f"quantise 4 bit, {count}", boundary=quantise(4), lr=LR["quantise"], cuts=cuts)
        thin = replace(ROW, question=base.question, priority=base.priority, cuts=cuts)
        yield replace(thin, name=f"subspace 16x, {count}")
        confined = SubspaceConfig(free_last=False)
        yield replace(thin, name=f"subspace 16x, last segment confined, {count}", subspace=confined)


def finalists() -> Iterator[Study]:
    """Three seeds, and as many tokens as there is time for."""
    for seed in SEEDS:
        base = replace(BASE, question="finalists", tokens=LONG, seed=seed, priority=5 + seed)
        yield base
        for ratio in (16, 8, 32):
            best = replace(ELEMENT, name=f"subspace {ratio}x plain AdamW", width=WIDTH[ratio])
            yield replace(best, question=base.question, tokens=LONG, seed=seed, priority=base.priority)
        yield replace(base, name="topk 8x", boundary=TOPK[8], lr=LR["topk"])
        yield replace(base, name="quantise 4 bit", boundary=quantise(4), lr=LR["quantise"])


RUNS = sorted((*learning_rates(), *pieces(), *ratios(), *depths(), *finalists()), key=lambda study: study.priority)
assert len({study.key for study in RUNS}) == len(RUNS), "two runs have one name"
