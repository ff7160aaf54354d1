"""The figures of the study over bytes and over learning rates; `gaps.py` draws the others."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence.results import Compared, Result
from benchmarks.convergence.runs import DENSE
from thinpipe.report.figures import pyplot

BLUE, GREEN, ORANGE, PURPLE, PINK, BLACK = "#08519c", "#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#222222"
Families = Mapping[str, tuple[str, str, str]]
FAMILIES: Families = {
    "subspace, row-wise AdamW": ("subspace {}x", BLUE, "o"),
    "subspace, plain AdamW": ("subspace {}x plain AdamW", GREEN, "s"),
    "top-k": ("topk {}x", ORANGE, "^"),
    "low rank": ("lowrank {}x", PURPLE, "v"),
    "quantised": ("quantise {} bit", PINK, "D"),
}
"""A line of the Pareto plot: names of its runs, its colour and marker."""
STRENGTHS = (2, 4, 8, 16, 32)
TICKS = (32, 64, 128, 256, 512, 1024)


def finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def beside(axes: Any) -> None:
    """The legend where it hides nothing."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def names_of(pattern: str) -> set[str]:
    return {pattern.format(n) for n in STRENGTHS}


def draw_pareto(compared: Sequence[Compared], path: Path, families: Families = FAMILIES, line: str = "-") -> None:
    """The gap over bytes, one panel for each budget of tokens: down and to the left is better. With `line`s."""
    plt = pyplot()
    names = {result.name for result, _ in compared}
    families = {label: family for label, family in families.items() if names & names_of(family[0])}
    budgets = sorted({result.tokens for result, _ in compared})
    size = (5.6 * len(budgets) + 0.6, 4.6)
    figure, panels = plt.subplots(1, len(budgets), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axes, tokens in zip(panels[0], budgets, strict=True):
        draw_budget(axes, [(result, gap) for result, gap in compared if result.tokens == tokens], families, line)
        axes.set_title(f"after {tokens / 1e6:.1f} M tokens")
        axes.set_xlabel("bytes per token at each of 3 boundaries, both directions")
    panels[0][0].set_ylabel("validation loss above dense, %")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3 * len(budgets))
    figure.suptitle("Solid: mean of several seeds, bars from least to most. Hollow: one seed.", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_budget(axes: Any, compared: Sequence[Compared], families: Families, line: str) -> None:
    for label, (pattern, colour, marker) in families.items():
        points: dict[float, list[float]] = defaultdict(list)
        for result, gap in compared:
            if result.name in names_of(pattern):
                points[result.bytes_per_token].append(gap)
        places = sorted(points)
        middle = [mean(points[place]) for place in places]
        below = [at - min(points[place]) for at, place in zip(middle, places, strict=True)]
        above = [max(points[place]) - at for at, place in zip(middle, places, strict=True)]
        style = {"color": colour, "marker": marker, "linestyle": line}
        axes.errorbar(places, middle, yerr=(below, above), capsize=3, label=label, **style)
        alone = [(place, at) for place, at in zip(places, middle, strict=True) if len(points[place]) == 1]
        if alone:
            axes.plot(*zip(*alone, strict=True), marker, color=colour, markerfacecolor="white", zorder=5)
    axes.axhline(0, color=BLACK, linewidth=1)
    axes.plot(DENSE.nbytes_per_token, 0, "*", color=BLACK, markersize=11, label="dense, bf16", clip_on=False)
    axes.set_xscale("log")
    axes.set_xlim(25, 1300)
    axes.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS])
    axes.minorticks_off()
    finish(axes)
    loss = mean(result.loss for result, _ in compared if result.name == "dense")
    nats = axes.secondary_yaxis("right", functions=(lambda p: loss * (1 + p / 100), lambda n: 100 * (n / loss - 1)))
    nats.set_ylabel("nats per token (dense: mean of its seeds)", fontsize=8)
    nats.tick_params(labelsize=8)


def draw_learning_rates(results: list[Result], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.question == "learning rate" and not result.diverged:
            by_name[result.name].append(result)
    for name, same in sorted(by_name.items(), key=lambda item: -min(result.loss for result in item[1])):
        same.sort(key=lambda result: result.lr)
        axes.plot([r.lr for r in same], [r.loss for r in same], "o-", color=colour_of(name), label=name)
    axes.set_xscale("log")
    rates = sorted({r.lr for same in by_name.values() for r in same})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(xlabel="highest learning rate", ylabel="validation loss, nats per token")
    axes.set_title("0.5 M tokens, seed 0: the rate of every method")
    finish(axes)
    beside(axes)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def colour_of(name: str) -> str:
    """That of its family."""
    for pattern, colour, _ in FAMILIES.values():
        if name in names_of(pattern):
            return colour
    return BLACK
