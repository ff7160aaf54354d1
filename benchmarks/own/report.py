"""The tables and figures of the study of the keel, from the records of its finished runs alone."""

from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.convergence.clock import read_times
from benchmarks.convergence.figures import BLUE, GREEN, ORANGE, PINK, PURPLE, beside, finish
from benchmarks.convergence.gaps import draw_over_tokens
from benchmarks.convergence.report import over_tokens_table, questions_tables, seeds_table
from benchmarks.convergence.results import Dense, Result, read_results
from benchmarks.own.runs import DENSE, LONG, RATES, WHOLE, keel
from benchmarks.own.to_loss import time_table, tokens_table
from thinpipe.report.figures import pyplot

READ_THIS = """\
```
thinpipe tokenize --sources BOOKS... --validation-sources BOOKS... --vocab-size 4096 --output TOKENS
python -m benchmarks.own run --data TOKENS
python -m benchmarks.own report
```

Made by the last of these from the records beside it, which hold settings, versions and losses. The gap is to the dense
run of the same seed, tokens and width; all trained with AdamW at the learning rate that is best for dense, top-k at
the best of its own: nothing else was tuned for any of them.
Validation: 20 batches spread over all validation books, the same for all runs."""
COLOURS = {
    "keel 32x": BLUE,
    "keel 32x, reach 1": "#9ecae1",
    "keel 16x": GREEN,
    "keel 16x, reach 1": "#a1d99b",
    "keel of all channels, bf16": ORANGE,
    "keel of all channels, bf16, reach 1": "#fdbe85",
}
FAMILIES = {
    "keel": (BLUE, "o"),
    "subspace": (GREEN, "s"),
    "learned": (PINK, "D"),
    "learned, our tables": ("#f768a1", "d"),
    "bottleneck": ("#666666", "P"),
    "bottleneck, our tables": ("#aaaaaa", "p"),
    "lowrank": (PURPLE, "v"),
    "topk": (ORANGE, "^"),
}


def report(output: Path) -> None:
    results = read_results(output)
    dense, wide = Dense(results), Dense(results, "dense, d = 512")
    narrow = [result for result in results if "d = 512" not in result.name and dense.has(result)]
    twice = [result for result in results if "d = 512" in result.name and wide.has(result)]
    if not narrow:
        print("no finished runs yet: python -m benchmarks.own run --data TOKENS")
        return
    full = DENSE.nbytes_per_token
    lines = ["# The keel against dense and against the others", "", READ_THIS, ""]
    lines += [*seeds_table(narrow, dense, full), *over_tokens_table(narrow, dense, COLOURS)]
    lines += [*crossing_table(narrow), *questions_tables(narrow, dense, full)]
    if twice:
        lines += [*questions_tables(twice, wide, 2 * full - 2), *seeds_table(twice, wide, 2 * full - 2)]
    ours = keel(32)
    lines += tokens_table(results, ours.name)
    lines += time_table(results, read_times(output), ours.name, full / ours.nbytes_per_token, RATES)
    text = "\n".join([*lines, ""])
    (output / "own.md").write_text(text)
    draw_over_tokens(narrow, dense, output / "over_tokens.png", COLOURS)
    long = [result for result in narrow if result.tokens == LONG]
    if any(result.question == "methods" for result in long):
        draw_methods(long, dense, output / "methods.png")
    print(text)


def crossing_table(results: list[Result]) -> list[str]:
    """Tables make a better model than dense has, so the gap to dense does not say what is lost at boundaries."""
    lines = [
        "## What is lost at boundaries",
        "",
        "Against the same model and tables, of which all channels cross, in bf16.",
        "",
        "| run | M tokens | seed | validation loss | all channels | lost, % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for suffix in ("", ", reach 1"):
        whole = Dense(results, f"{WHOLE.name}{suffix}")
        for result in results:
            if result.name in (f"keel 16x{suffix}", f"keel 32x{suffix}") and whole.has(result) and not result.diverged:
                lines.append(
                    f"| {result.name} | {result.tokens / 1e6:.2f} | {result.seed} | {result.loss:.4f} | "
                    f"{whole.of(result).loss:.4f} | {whole.gap(result).percent:+.2f} |"
                )
    return [*lines, ""] if len(lines) > 6 else []


def draw_methods(results: list[Result], dense: Dense, path: Path) -> None:
    """The gap over bytes at the tokens that all methods were trained for: down and to the left is better."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for family, (colour, marker) in FAMILIES.items():
        same = [result for result in results if result.name in (f"{family} 16x", f"{family} 32x")]
        draw_family(axes, family, same, dense, colour, marker)
    axes.axhline(0, color="#444444", linewidth=1)
    axes.set_xticks((32, 64))
    axes.set(
        xlabel="bytes per token at each of 3 boundaries, both ways (dense: 1,026)",
        ylabel="validation loss above dense, %",
        title=f"Every method at the same bytes, {LONG / 1e6:.2f} M tokens",
    )
    finish(axes)
    beside(axes)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_family(axes: Any, label: str, results: list[Result], dense: Dense, colour: str, marker: str) -> None:
    points: dict[float, list[float]] = defaultdict(list)
    for result in results:
        if not result.diverged:
            points[result.bytes_per_token].append(dense.gap(result).percent)
    if not points:
        return
    places = sorted(points)
    axes.plot(places, [mean(points[at]) for at in places], f"{marker}-", color=colour, label=label)
    for at in places:
        axes.vlines(at, min(points[at]), max(points[at]), color=colour, linewidth=5, alpha=0.25)
