"""Which runs the study has, by priority: first what the others depend on, then one question after the other.

The first question is the learning rate of every kind of method; all others use the best that its records show.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.convergence.execute import is_done, result_path
from benchmarks.convergence.study import Study
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import BasisConfig

SHORT, LONG = 524_288, 1_048_576
TOKENS_PER_CORE_SECOND = 3_000.0
"""Roughly, for the estimate of core-hours: one thread, while another run has the other core."""

RATES: dict[str, tuple[float, ...]] = {
    "dense": (7.5e-4, 1.5e-3, 3e-3),
    "row": (7.5e-4, 1.5e-3, 3e-3),
    "element": (3.75e-4, 7.5e-4, 1.5e-3, 3e-3, 6e-3),
    "topk": (7.5e-4, 1.5e-3, 3e-3, 6e-3),
    "quantise": (7.5e-4, 1.5e-3, 3e-3),
    "lowrank": (7.5e-4, 1.5e-3, 3e-3),
}
"""At 16 times fewer bytes d/k is 16, its root 4: plain AdamW moves coordinates by 4 times less than the row-wise rule,
so its rates reach higher. In a first try, up to 2.4e-2, higher rates were worse for all of them."""

SEEDS = (0, 1, 2)


def core_hours(study: Study) -> float:
    return study.tokens / TOKENS_PER_CORE_SECOND / 3600


def topk(keep: float, *, reuse: bool = True, feedback: str = "none") -> BoundaryConfig:
    states = CompressionConfig(kind="topk", keep=keep, feedback=feedback)  # type: ignore[arg-type]
    gradients = CompressionConfig(kind="topk", reuse_mask=True) if reuse else CompressionConfig(kind="topk", keep=keep)
    return BoundaryConfig(states=states, gradients=gradients)


def quantise(bits: int) -> BoundaryConfig:
    compression = CompressionConfig(kind="quantise", bits=bits, tile=128, rotate=True)
    return BoundaryConfig(states=compression, gradients=compression)


def lowrank(rank: int) -> BoundaryConfig:
    compression = CompressionConfig(kind="lowrank", rank=rank)
    return BoundaryConfig(states=compression, gradients=compression)


TOPK = {8: topk(0.09), 16: topk(0.041), 32: topk(0.0205)}
LOWRANK = {8: lowrank(21), 16: lowrank(10), 32: lowrank(5)}
WIDTH = {8: 32, 16: 16, 32: 8}
"""By how many times fewer bytes than dense bf16."""

DENSE = Study(question="learning rate", name="dense", kind="dense", priority=0, tokens=SHORT, lr=1.5e-3)
ROW = replace(DENSE, name="subspace 16x", kind="row", width=WIDTH[16])
ELEMENT = replace(ROW, name="subspace 16x plain AdamW", kind="element", second_moment="element")
METHODS = {
    "dense": DENSE,
    "row": ROW,
    "element": ELEMENT,
    "topk": replace(DENSE, name="topk 16x", kind="topk", boundary=TOPK[16]),
    "quantise": replace(DENSE, name="quantise 2 bit", kind="quantise", boundary=quantise(2)),
    "lowrank": replace(DENSE, name="lowrank 16x", kind="lowrank", boundary=LOWRANK[16]),
}


def learning_rates() -> list[Study]:
    return [replace(METHODS[kind], lr=rate) for kind, rates in RATES.items() for rate in rates]


def best_rates(output: Path) -> dict[str, float]:
    """Of each kind, by the records of the first question; before there are any, the one in the middle."""
    best = {}
    for kind, rates in RATES.items():
        losses = {rate: _last_loss(replace(METHODS[kind], lr=rate), output) for rate in rates}
        known = {rate: loss for rate, loss in losses.items() if loss is not None}
        best[kind] = min(known, key=known.__getitem__) if known else rates[len(rates) // 2]
    return best


def at_the_edge(best: Mapping[str, float]) -> list[str]:
    """Kinds whose best rate is the lowest or the highest that was tried: there may be a better one beyond."""
    return [kind for kind, rate in best.items() if rate in (RATES[kind][0], RATES[kind][-1])]


def _last_loss(study: Study, output: Path) -> float | None:
    if not is_done(study, output):
        return None
    kept = json.loads(result_path(study, output).read_text())
    return kept["validations"][-1]["loss"] if kept["ended"] == "finished" else None


class Questions:
    """All but the first, at these learning rates."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        self.base = {kind: replace(METHODS[kind], lr=rate) for kind, rate in rates.items()}

    def of(self, kind: str, question: str, priority: int, name: str | None = None) -> Study:
        study = self.base[kind]
        return replace(study, question=question, priority=priority, name=name or study.name)

    def noise(self) -> Iterator[Study]:
        """What another seed changes, so that the tables of one seed can be read."""
        for seed in SEEDS[1:]:
            for kind in ("dense", "row"):
                yield replace(self.of(kind, "noise", 1), seed=seed)

    def pieces(self) -> Iterator[Study]:
        """The paper's parts, one by one, at 16 times fewer bytes."""

        def row(name: str) -> Study:
            return self.of("row", "pieces", 2, name)

        for interval in (50, 200):
            yield replace(row(f"basis every {interval}"), basis=BasisConfig(interval=interval))
        for size in (0.1, 10.0):
            named = row(f"basis every 50, step size {size:g}")
            yield replace(named, basis=BasisConfig(interval=50, step_size=size))
        yield replace(row("Gaussian table"), subspace=SubspaceConfig(fixed="gaussian"))
        for std in (0.002, 0.2):
            yield replace(row(f"table of {std:g}"), subspace=SubspaceConfig(fixed_std=std))
        yield replace(row("last segment confined"), subspace=SubspaceConfig(free_last=False))
        yield replace(row("same trainable count"), matched=True)
        plain = self.of("element", "pieces", 2, "plain AdamW, basis every 50")
        yield replace(plain, basis=BasisConfig(interval=50))

    def ratios(self) -> Iterator[Study]:
        """Every method at the same bytes; those at 16 times were runs of the first question."""
        for ratio in (8, 32):
            yield replace(self.of("row", "bytes", 3, f"subspace {ratio}x"), width=WIDTH[ratio])
            yield replace(self.of("topk", "bytes", 3, f"topk {ratio}x"), boundary=TOPK[ratio])
            yield replace(self.of("lowrank", "bytes", 3, f"lowrank {ratio}x"), boundary=LOWRANK[ratio])
        for bits in (4, 8):
            yield replace(self.of("quantise", "bytes", 3, f"quantise {bits} bit"), boundary=quantise(bits))
        own = self.of("topk", "bytes", 3, "topk 8x, own mask backward")
        yield replace(own, boundary=topk(0.0635, reuse=False))
        for feedback in ("ef", "ef21"):
            yield replace(self.of("topk", "bytes", 3, f"topk 8x, {feedback}"), boundary=topk(0.09, feedback=feedback))

    def depths(self) -> Iterator[Study]:
        """Do errors pile up with the number of boundaries? Those with three were runs of the questions above."""
        for cuts in ((4,), (1, 2, 3, 4, 5, 6, 7)):
            count = f"{len(cuts)} boundaries" if len(cuts) > 1 else "1 boundary"
            yield replace(self.of("topk", "boundaries", 4, f"topk 16x, {count}"), cuts=cuts)
            four = self.of("quantise", "boundaries", 4, f"quantise 4 bit, {count}")
            yield replace(four, boundary=quantise(4), cuts=cuts)
            yield replace(self.of("row", "boundaries", 4, f"subspace 16x, {count}"), cuts=cuts)
            confined = self.of("row", "boundaries", 4, f"subspace 16x, last segment confined, {count}")
            yield replace(confined, subspace=SubspaceConfig(free_last=False), cuts=cuts)

    def lower_rates(self) -> Iterator[Study]:
        """Top-k's rate was found at 16x with three boundaries; elsewhere, runs at it never left a first plateau."""
        base = self.base["topk"].lr
        for cuts, name in (((4,), "topk 16x, 1 boundary"), ((1, 2, 3, 4, 5, 6, 7), "topk 16x, 7 boundaries")):
            for part in (2, 4):
                yield replace(self.of("topk", "boundaries", 8, name), cuts=cuts, lr=base / part)
        yield replace(self.of("topk", "bytes", 8, "topk 32x"), boundary=TOPK[32], lr=base / 2)
        own = self.of("topk", "bytes", 8, "topk 8x, own mask backward")
        yield replace(own, boundary=topk(0.0635, reuse=False), lr=base / 4)
        for feedback in ("ef", "ef21"):
            variant = self.of("topk", "bytes", 8, f"topk 8x, {feedback}")
            yield replace(variant, boundary=topk(0.09, feedback=feedback), lr=base / 4)

    def finalists(self) -> Iterator[Study]:
        """Three seeds, and as many tokens as there is time for; half the rate too, since more steps may want less."""
        for seed in SEEDS:

            def final(kind: str, name: str, seed: int = seed) -> Study:
                return replace(self.of(kind, "finalists", 5 + seed, name), tokens=LONG, seed=seed)

            yield final("dense", "dense")
            yield final("row", "subspace 16x")
            yield replace(final("topk", "topk 8x"), boundary=TOPK[8])
            yield replace(final("quantise", "quantise 4 bit"), boundary=quantise(4), priority=8 + seed)
            for ratio in (8, 32):
                yield replace(final("row", f"subspace {ratio}x"), width=WIDTH[ratio], priority=11 + seed)
            if seed == 0:
                yield replace(final("dense", "dense"), lr=self.base["dense"].lr / 2, priority=14)
                yield replace(final("row", "subspace 16x"), lr=self.base["row"].lr / 2, priority=14)

    def __iter__(self) -> Iterator[Study]:
        yield from self.noise()
        yield from self.pieces()
        yield from self.ratios()
        yield from self.depths()
        yield from self.lower_rates()
        yield from self.finalists()


def all_runs(output: Path) -> list[Study]:
    """By priority, at the learning rates that the records in `output` show to be best."""
    runs = [*learning_rates(), *Questions(best_rates(output))]
    assert len({study.key for study in runs}) == len(runs), "two runs have one name"
    return sorted(runs, key=lambda study: study.priority)
