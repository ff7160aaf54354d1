"""The figures of the study."""

from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence.results import Dense, Result, best_of_learning_rates
from benchmarks.convergence.runs import DENSE
from thinpipe.report.curve import pyplot

FAMILIES = {
    "subspace, row-wise AdamW": ("subspace {}x", "#08519c", "o"),
    "subspace, plain AdamW": ("subspace {}x plain AdamW", "#1b9e77", "s"),
    "top-k": ("topk {}x", "#d95f02", "^"),
    "low rank": ("lowrank {}x", "#7570b3", "v"),
    "quantised": ("quantise {} bit", "#e7298a", "D"),
}
"""A line of the Pareto plot: names of its runs, its colour and marker."""

DEPTHS = {
    "subspace 16x": ("subspace 16x", "#08519c"),
    "subspace 16x, last segment confined": ("last segment confined", "#6baed6"),
    "topk 16x": ("topk 16x", "#d95f02"),
    "quantise 4 bit": ("quantise 4 bit", "#e7298a"),
}
"""A line over the number of boundaries: how names begin, the name of the run with three, and the colour."""


def finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def draw_pareto(results: list[Result], dense: Dense, path: Path) -> None:
    """The gap over bytes, one panel for each budget of tokens: down and to the left is better."""
    plt = pyplot()
    best = [result for result in best_of_learning_rates(results) if not result.diverged]
    budgets = sorted({result.tokens for result in best})
    figure, panels = plt.subplots(
        1, len(budgets), figsize=(5.5 * len(budgets), 4.2), layout="constrained", squeeze=False
    )
    for axes, tokens in zip(panels[0], budgets, strict=True):
        for label, (pattern, colour, marker) in FAMILIES.items():
            points: dict[float, list[float]] = defaultdict(list)
            for result in best:
                if result.tokens == tokens and result.name in {pattern.format(n) for n in (2, 4, 8, 16, 32)}:
                    points[result.bytes_per_token].append(dense.gap(result).percent)
            if not points:
                continue
            places = sorted(points)
            middle = [mean(points[place]) for place in places]
            below = [at - min(points[place]) for at, place in zip(middle, places, strict=True)]
            above = [max(points[place]) - at for at, place in zip(middle, places, strict=True)]
            axes.errorbar(
                places, middle, yerr=(below, above), color=colour, marker=marker, markersize=6, capsize=3, label=label
            )
        axes.axhline(0, color="#444444", linewidth=1)
        axes.annotate(f"as good as dense bf16 ({DENSE.nbytes_per_token:,.0f} bytes)", (0.98, 0),
                      xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)  # fmt: skip
        axes.set_xscale("log")
        axes.set_xlim(25, 650)
        axes.set_xticks([32, 64, 128, 256, 512], ["32", "64", "128", "256", "512"])
        axes.minorticks_off()
        axes.set(
            xlabel="bytes per token at each of 3 boundaries, both ways", ylabel="validation loss above dense, %",
            title=f"{tokens / 1e6:.1f} M tokens",
        )  # fmt: skip
        finish(axes)
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_learning_rates(results: list[Result], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.question == "learning rate" and not result.diverged:
            by_name[result.name].append(result)
    for index, (name, same) in enumerate(sorted(by_name.items())):
        colour = plt.get_cmap("tab10")(index)
        same.sort(key=lambda result: result.lr)
        axes.plot([r.lr for r in same], [r.loss for r in same], "o-", color=colour, label=name)
    axes.set_xscale("log")
    rates = sorted({r.lr for same in by_name.values() for r in same})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(xlabel="highest learning rate", ylabel="validation loss, nats per token", title="The rate of every method")
    finish(axes)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_over_tokens(results: list[Result], dense: Dense, path: Path) -> None:
    """Does the gap grow? The longest runs of each name, seeds thin, their mean thick."""
    longest = max(result.tokens for result in results)
    by_name: dict[str, list[Result]] = defaultdict(list)
    for result in best_of_learning_rates(results):
        if result.tokens == longest and result.name != "dense" and not result.diverged:
            by_name[result.name].append(result)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    ends = sorted(by_name.items(), key=lambda item: -mean(dense.gap(result).percent for result in item[1]))
    for index, (name, same) in enumerate(ends):
        colour = plt.get_cmap("tab10")(index)
        curves = [dict(dense.percent_over_tokens(result)) for result in same]
        for curve in curves:
            axes.plot([at / 1e6 for at in curve], list(curve.values()), color=colour, linewidth=0.7, alpha=0.6)
        places = sorted(set.intersection(*(set(curve) for curve in curves)))
        middle = [mean(curve[at] for curve in curves) for at in places]
        axes.plot([at / 1e6 for at in places], middle, "o-", color=colour, linewidth=2, label=name)
    axes.axhline(0, color="#444444", linewidth=1)
    axes.set(xlabel="tokens, millions", ylabel="validation loss above dense, %", title="Does the gap grow?")
    finish(axes)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_boundaries(results: list[Result], dense: Dense, path: Path) -> None:
    """Do errors pile up with the number of boundaries? Of seed 0, at the fewest tokens."""
    shortest = min(result.tokens for result in results)
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4.2), layout="constrained")
    for label, (with_three, colour) in DEPTHS.items():
        names = {with_three, f"{label}, 1 boundary", f"{label}, 7 boundaries"}
        points = {
            result.boundaries: dense.gap(result).percent
            for result in best_of_learning_rates(results)
            if result.name in names and result.tokens == shortest and result.seed == 0 and not result.diverged
        }
        if points:
            places = sorted(points)
            axes.plot(places, [points[place] for place in places], "o-", color=colour, label=label)
    axes.set(xlabel="boundaries", ylabel="validation loss above dense, %", xticks=[1, 3, 7], title="Do errors pile up?")
    axes.set_ylim(bottom=0)
    finish(axes)
    if axes.lines:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
