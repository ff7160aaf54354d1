"""The tables and answers of the study, from nothing but the records of its finished runs. Rules: PREREGISTRATION.md."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.convergence.execute import is_done
from benchmarks.convergence.report import spread
from benchmarks.optimal.fits import PowerLaw, fit_power_law, slope
from benchmarks.optimal.runs import (
    BASE_WIDTH,
    CUTS,
    MODELS,
    SEEDS,
    TUNED_LIKE,
    WIDTHS,
    Model,
    WidthRun,
    best_rate,
    loss_of,
    other_methods,
    share_run,
    study,
    tuned_losses,
)

MAX_GROWTH = 0.3
"""Points of the gap from 1 to 7 boundaries, on the fitted line, below which it "does not grow"."""
BOUNDARY_MODELS: tuple[Model, Model] = ("K32", "D+")
READ_THIS = """\
# What a thin boundary costs at 20 tokens per block weight

Made by `python -m benchmarks.optimal report` from the records beside it. Models, data, fits and the rules of the
answers were written down before the first run: `benchmarks/optimal/PREREGISTRATION.md`. Losses are those on the three
reported books. Gaps are in % of the loss they are compared with, each with the run of the same seed: mean (least …
largest).
"""


class Losses:
    """Losses on the reported books, by run."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.rates: dict[Model, float] = {model: best_rate(model, output) for model in MODELS}

    def runs(self, model: Model, dim: int, boundaries: int = 3) -> list[WidthRun]:
        """One run per seed of the width."""
        rate = self.rates[model]
        return [study(model, dim, lr=rate, seed=seed, boundaries=boundaries) for seed in SEEDS[dim]]

    def shares(self) -> list[WidthRun]:
        return [share_run(seed, self.rates["K32"]) for seed in SEEDS[BASE_WIDTH]]

    def of(self, runs: Iterable[WidthRun]) -> list[float]:
        return [loss_of(run, self.output) for run in runs]

    def gaps(self, runs: Sequence[WidthRun], baselines: Sequence[WidthRun]) -> list[float]:
        """In %, seed by seed."""
        pairs = zip(self.of(runs), self.of(baselines), strict=True)
        return [100 * (loss / baseline - 1) for loss, baseline in pairs]

    def trouble(self, runs: Iterable[WidthRun]) -> str | None:
        """Why there is no table: runs without a record, or that diverged."""
        every = list(runs)
        missing = [run for run in every if not is_done(run, self.output)]
        if missing:
            names = "; ".join(f"{run.name} (seed {run.seed})" for run in missing)
            return f"No table yet. Missing: {names}."
        diverged = [run for run in every if not math.isfinite(loss_of(run, self.output))]
        return f"No table. Diverged: {'; '.join(run.key for run in diverged)}." if diverged else None


Section = Callable[[Losses], list[str]]


def report(output: Path) -> None:
    """Prints the tables and writes OUTPUT/optimal.md."""
    losses = Losses(output)
    lines = [READ_THIS]
    for title, section in SECTIONS.items():
        lines += [f"## {title}", "", *section(losses), ""]
    text = "\n".join(lines)
    output.mkdir(parents=True, exist_ok=True)
    (output / "optimal.md").write_text(text)
    print(text)


def rates_section(losses: Losses) -> list[str]:
    lines = ["Losses on the three tuning books, d = 64, 10 tokens per block weight.", ""]
    for model in dict.fromkeys(TUNED_LIKE.values()):
        found = sorted(tuned_losses(model, losses.output).items())
        points = ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in found)
        edge = len(found) > 1 and losses.rates[model] in (found[0][0], found[-1][0])
        chosen = f"; {losses.rates[model]:g} is taken" + (", at the edge of those tried" if edge else "")
        lines.append(f"- {model}: {points + chosen if found else 'no record yet'}")
    return lines


def widths_section(losses: Losses) -> list[str]:
    runs = {(model, dim): losses.runs(model, dim) for dim in WIDTHS for model in MODELS}
    trouble = losses.trouble(run for same in runs.values() for run in same)
    if trouble:
        return [trouble]
    lines = [
        "| d | seeds | D | D+ | K16 | K32 | D+ to D | K16 to D | K32 to D | K16 to D+ | K32 to D+ |",
        "|" + "---:|" * 11,
    ]
    pairs: tuple[tuple[Model, Model], ...] = (("D+", "D"), ("K16", "D"), ("K32", "D"), ("K16", "D+"), ("K32", "D+"))
    for dim in WIDTHS:
        cells = [f"{mean(losses.of(runs[model, dim])):.4f}" for model in MODELS]
        cells += [spread(losses.gaps(runs[one, dim], runs[other, dim])) for one, other in pairs]
        lines.append(f"| {dim} | {len(SEEDS[dim])} | {' | '.join(cells)} |")
    keels: tuple[Model, ...] = ("K16", "K32")
    for model in keels:
        law = fit_power_law({dim: losses.gaps(runs[model, dim], runs["D+", dim]) for dim in WIDTHS})
        lines += ["", f"{model} to D+: {describe(law)}"]
    return lines


def describe(law: PowerLaw) -> str:
    verdict = "shrinks with width" if law.shrinks_with_width else "no answer: the interval is not above 0"
    return f"gap = {law.c:.3g} d^-b, b = {law.b:.2f}, 95 % interval {law.low:.2f} … {law.high:.2f}: **{verdict}**."


def share_section(losses: Losses) -> list[str]:
    narrow, wide = BASE_WIDTH, WIDTHS[-1]
    shares, widest = losses.shares(), losses.runs("K32", wide)
    baselines = {dim: losses.runs("D+", dim) for dim in (narrow, wide)}
    trouble = losses.trouble([*shares, *widest, *baselines[narrow], *baselines[wide]])
    if trouble:
        return [trouble]
    gaps = {narrow: losses.gaps(shares, baselines[narrow]), wide: losses.gaps(widest, baselines[wide])}
    return [
        "With bytes fixed, k/d grows with d. Here k/d is that of K32 at the largest width. Gaps to D+.",
        "",
        *(
            f"- d = {dim}, {runs[0].projection.width} channels: {spread(gaps[dim])}"
            for dim, runs in ((narrow, shares), (wide, widest))
        ),
        "",
        f"At equal share: {describe(fit_power_law(gaps))}",
    ]


def boundaries_section(losses: Losses) -> list[str]:
    keels, whole = ({count: losses.runs(model, BASE_WIDTH, count) for count in CUTS} for model in BOUNDARY_MODELS)
    trouble = losses.trouble(run for runs in (*keels.values(), *whole.values()) for run in runs)
    if trouble:
        return [trouble]
    gaps = {count: losses.gaps(keels[count], whole[count]) for count in CUTS}
    growth = 6 * slope(gaps)
    verdict = (
        "does not grow with boundaries" if growth < MAX_GROWTH else "grows with boundaries, or too little is known"
    )
    return [
        f"K32 to D+ with as many boundaries, d = {BASE_WIDTH}.",
        "",
        "| boundaries | D+ | K32 | K32 to D+ |",
        "|---:|---:|---:|---:|",
        *(
            f"| {count} | {mean(losses.of(whole[count])):.4f} | {mean(losses.of(keels[count])):.4f} | "
            f"{spread(gaps[count])} |"
            for count in CUTS
        ),
        "",
        f"Slope x 6: {growth:+.2f} points, to be below {MAX_GROWTH}: **{verdict}**.",
    ]


def others_section(losses: Losses) -> list[str]:
    runs, dense = list(other_methods(losses.output)), losses.runs("D", BASE_WIDTH)[:1]
    trouble = losses.trouble([*runs, *dense])
    if trouble:
        return [trouble]
    return [
        "One seed.",
        "",
        "| run | times fewer bytes | loss | to D, % |",
        "|---|---:|---:|---:|",
        *(
            f"| {run.name} | {run.fewer_bytes:.1f} | {losses.of([run])[0]:.4f} | {losses.gaps([run], dense)[0]:+.2f} |"
            for run in runs
        ),
    ]


SECTIONS: dict[str, Section] = {
    "Learning rates": rates_section,
    "Over widths": widths_section,
    "At equal share of channels": share_section,
    "Over boundaries": boundaries_section,
    "Other methods": others_section,
}
