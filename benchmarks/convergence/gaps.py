"""The figures of the study about the gap to dense: over tokens, over boundaries, and piece by piece."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import mean

from benchmarks.convergence.figures import BLUE, GREEN, ORANGE, PINK, beside, finish
from benchmarks.convergence.results import Dense, Result, best_of_learning_rates
from thinpipe.report.figures import pyplot

WHOLE = "subspace 16x"
"""What the pieces are taken from."""
FINALISTS = {
    "topk 8x": ORANGE,
    "subspace 32x": "#3182bd",
    "subspace 16x": BLUE,
    "subspace 8x": "#9ecae1",
    "quantise 4 bit": PINK,
}
DEPTHS = {
    "subspace 16x": ("subspace 16x", BLUE, "o"),
    "subspace 16x, last segment confined": ("last segment confined", "#6baed6", "s"),
    "topk 16x": ("topk 16x", ORANGE, "^"),
    "quantise 4 bit": ("quantise 4 bit", PINK, "D"),
}
"""A line over the number of boundaries: how names begin, the name of the run with three, its colour and marker."""


def longest_of(results: list[Result], names: Iterable[str]) -> dict[str, list[Result]]:
    """Of each, all seeds of its longest runs."""
    found = {}
    for name in names:
        best = [each for each in best_of_learning_rates(results) if each.name == name and not each.diverged]
        longest = max((result.tokens for result in best), default=0)
        found[name] = [each for each in best if each.tokens == longest]
    return {name: same for name, same in found.items() if same}


def draw_over_tokens(results: list[Result], dense: Dense, path: Path, colours: Mapping[str, str] = FINALISTS) -> None:
    """Does the gap grow? The longest runs of each of these, seeds thin, their mean thick; crosses: shorter runs."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.5, 4.5), layout="constrained")
    for name, same in longest_of(results, colours).items():
        colour = colours[name]
        curves = [dict(dense.percent_over_tokens(result)) for result in same]
        for curve in curves:
            axes.plot([at / 1e6 for at in curve], list(curve.values()), color=colour, linewidth=0.7, alpha=0.6)
        places = sorted(set.intersection(*(set(curve) for curve in curves)))
        middle = [mean(curve[at] for curve in curves) for at in places]
        label = f"{name} ({len(same)} seed{'s' if len(same) > 1 else ''})"
        axes.plot([at / 1e6 for at in places], middle, "o-", color=colour, linewidth=2, label=label)
        shorter: dict[int, list[float]] = defaultdict(list)
        for result in best_of_learning_rates(results):
            if result.name == name and result.tokens < same[0].tokens and not result.diverged:
                shorter[result.tokens].append(dense.gap(result).percent)
        for tokens, gaps in shorter.items():
            axes.plot(tokens / 1e6, mean(gaps), "X", color=colour, markeredgecolor="black", markersize=9)
    axes.axhline(0, color="#444444", linewidth=1)
    axes.set(xlabel="tokens, millions", ylabel="validation loss above dense, %", title="Does the gap grow?")
    finish(axes)
    beside(axes)
    figure.supxlabel("Thin: seeds. Thick: their mean. Crosses: the ends of shorter runs of the same.", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_boundaries(results: list[Result], dense: Dense, path: Path) -> None:
    """Do errors pile up with the number of boundaries? Of seed 0, at the fewest tokens; a bar where there are more."""
    shortest = min(result.tokens for result in results)
    best = [each for each in best_of_learning_rates(results) if each.tokens == shortest and not each.diverged]
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.4), layout="constrained")
    for label, (with_three, colour, marker) in DEPTHS.items():
        names = {with_three, f"{label}, 1 boundary", f"{label}, 7 boundaries"}
        found: dict[int, dict[int, float]] = defaultdict(dict)
        for result in best:
            if result.name in names:
                found[result.boundaries][result.seed] = dense.gap(result).percent
        points = {at: by_seed[0] for at, by_seed in sorted(found.items()) if 0 in by_seed}
        if points:
            axes.plot(list(points), list(points.values()), f"{marker}-", color=colour, label=label)
        for at, by_seed in found.items():
            if len(by_seed) > 1:
                axes.vlines(at, min(by_seed.values()), max(by_seed.values()), color=colour, linewidth=5, alpha=0.25)
    axes.set(xlabel="boundaries", ylabel="validation loss above dense, %", xticks=[1, 3, 7], title="Do errors pile up?")
    axes.axhline(0, color="#444444", linewidth=1)
    finish(axes)
    beside(axes)
    figure.supxlabel("Lines: seed 0. The wide bar is what three seeds of one of these runs span.", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_pieces(results: list[Result], dense: Dense, path: Path) -> None:
    """One row for each piece that was changed, seed 0, beside what three seeds of the unchanged run span."""
    best = [result for result in best_of_learning_rates(results) if not result.diverged]
    plain = f"{WHOLE} plain AdamW"
    pieces = {result.name: result for result in best if result.question == "pieces" or result.name == plain}
    whole = [result for result in best if result.name == WHOLE and result.tokens in {p.tokens for p in pieces.values()}]
    if not pieces or not whole:
        return
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 1.4 + 0.36 * len(pieces)), layout="constrained")
    gaps = [dense.gap(result).percent for result in sorted(whole, key=lambda result: result.seed)]
    axes.axvspan(min(gaps), max(gaps), color=BLUE, alpha=0.12, linewidth=0, label="what seeds change")
    axes.axvline(gaps[0], color=BLUE, linewidth=1, label="unchanged, seed 0")
    rows = sorted(pieces.items(), key=lambda item: dense.gap(item[1]).percent)
    axes.plot(gaps, [0] * len(gaps), "o", color=BLUE, label="unchanged, every seed")
    places = range(1, len(rows) + 1)
    axes.plot([dense.gap(result).percent for _, result in rows], places, "s", color=GREEN, label="changed, seed 0")
    names = [plain.removeprefix(f"{WHOLE} ") if name == plain else name for name, _ in rows]
    axes.set_yticks(range(len(rows) + 1), ["unchanged", *names])
    axes.invert_yaxis()
    axes.set(xlabel="validation loss above dense, %", title=f"{WHOLE}, one piece changed at a time")
    axes.set_xlim(left=0)
    finish(axes)
    axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
