"""Tables and figures of the study, from the records of its finished runs alone."""

from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence.results import Dense, Result, best_of_learning_rates, read_results
from benchmarks.convergence.study import DENSE, Study
from thinpipe.report.comparison import COLOURS
from thinpipe.report.curve import pyplot

FAMILIES = {
    "subspace, row-wise AdamW": ("subspace {}x", "#08519c", "o"),
    "subspace, plain AdamW": ("subspace {}x plain AdamW", "#1b9e77", "s"),
    "top-k": ("topk {}x", "#d95f02", "^"),
    "low rank": ("lowrank {}x", "#7570b3", "v"),
    "quantised": ("quantise {} bit", "#e7298a", "D"),
}
"""A line of the Pareto plot: names of its runs, its colour and marker."""


def report(output: Path) -> None:
    results = read_results(output)
    dense = Dense(results)
    results = [result for result in results if dense.has(result)]
    if not results:
        print("no finished runs yet: python -m benchmarks.convergence run --data TOKENS")
        return
    text = tables(results, dense)
    (output / "convergence.md").write_text(text)
    draw_pareto(results, dense, output / "pareto.png")
    draw_learning_rates(results, output / "learning_rates.png")
    draw_over_tokens(results, dense, output / "over_tokens.png")
    print(text)


def tables(results: list[Result], dense: Dense) -> str:
    lines = ["# What each boundary method costs in loss", "", "Made by `python -m benchmarks.convergence report`.", ""]
    full = Study(question="", name="", priority=0, tokens=0, lr=0.0).nbytes_per_token
    assert DENSE.forward == DENSE.backward == "bf16"
    for question in dict.fromkeys(result.question for result in results):
        lines += [
            f"## {question.capitalize()}",
            "",
            "| run | lr | seed | M tokens | bytes/token | fewer | M trainable | validation loss | bits/byte "
            "| gap, nats | gap, % | gap, bits/byte |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        ]
        same = [result for result in results if result.question == question]
        for result in sorted(same, key=lambda r: (r.tokens, r.name, r.seed, r.lr)):
            lines.append(row(result, dense, full))
        lines.append("")
    return "\n".join([*lines, *seeds_table(results, dense, full)]) + "\n"


def row(result: Result, dense: Dense, full: float) -> str:
    facts = (
        f"| {result.name} | {result.lr:g} | {result.seed} | {result.tokens / 1e6:.2f} | "
        f"{result.bytes_per_token:.0f} | {full / result.bytes_per_token:.1f}x | {result.trainable / 1e6:.2f} | "
    )
    if result.diverged:
        return facts + "diverged | | | | |"
    gap = dense.gap(result)
    return facts + (
        f"{result.loss:.4f} | {result.bits_per_byte:.4f} | {gap.nats:+.4f} | {gap.percent:+.2f} | "
        f"{gap.bits_per_byte:+.4f} |"
    )


def seeds_table(results: list[Result], dense: Dense, full: float) -> list[str]:
    """Runs with several seeds, each against the dense run of its own."""
    by_name: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in best_of_learning_rates(results):
        if not result.diverged:
            by_name[result.name, result.tokens].append(result)
    several = {key: same for key, same in by_name.items() if len(same) > 1}
    if not several:
        return []
    lines = [
        "## Over seeds",
        "",
        "The gap of each run to the dense run of its seed; in brackets the least and the largest.",
        "",
        "| run | M tokens | fewer bytes | seeds | validation loss | gap, % | at half the tokens, % |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, tokens), same in sorted(several.items(), key=lambda item: item[0][::-1]):
        gaps = [dense.gap(result).percent for result in same]
        curves = [dict(dense.percent_over_tokens(result)) for result in same]
        halves = [curve[tokens // 2] for curve in curves if tokens // 2 in curve]
        lines.append(
            f"| {name} | {tokens / 1e6:.2f} | {full / same[0].bytes_per_token:.1f}x | {len(same)} | "
            f"{mean(r.loss for r in same):.4f} | {spread(gaps)} | {spread(halves)} |"
        )
    return [*lines, ""]


def spread(values: list[float]) -> str:
    return f"{mean(values):+.2f} ({min(values):+.2f} … {max(values):+.2f})" if values else ""


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
        axes.annotate("as good as dense bf16 (1,026 bytes)", (0.98, 0), xycoords=("axes fraction", "data"),
                      ha="right", va="bottom", fontsize=8, color="#444444")  # fmt: skip
        axes.set_xscale("log")
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
    for colour, (name, same) in zip(COLOURS, sorted(by_name.items()), strict=False):
        same.sort(key=lambda result: result.lr)
        axes.plot([r.lr for r in same], [r.loss for r in same], "o-", color=colour, label=name)
    axes.set_xscale("log")
    rates = sorted({r.lr for same in by_name.values() for r in same})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set(xlabel="highest learning rate", ylabel="validation loss, nats per token", title="Every method at its best")
    finish(axes)
    axes.legend(frameon=False)
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
    colours = plt.get_cmap("tab10").colors
    ends = sorted(by_name.items(), key=lambda item: -mean(dense.gap(result).percent for result in item[1]))
    for colour, (name, same) in zip(colours, ends, strict=False):
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
