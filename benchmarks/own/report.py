"""The tables and figures of the study of the keel, from nothing but the records of its finished runs."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.convergence.clock import read_times
from benchmarks.convergence.figures import (
    BLUE,
    FAMILIES,
    GREEN,
    ORANGE,
    PINK,
    PURPLE,
    Families,
    draw_pareto,
    finish,
)
from benchmarks.convergence.gaps import draw_over_tokens
from benchmarks.convergence.report import over_tokens_table, questions_tables, seeds_table
from benchmarks.convergence.results import Dense, Result, compared, read_results
from benchmarks.own.control import control_table
from benchmarks.own.runs import DENSE, RATES, RIVAL, WHOLE, WIDE, keel
from benchmarks.own.to_loss import QUESTION, time_table, tokens_table
from thinpipe.report.figures import pyplot

READ_THIS = """\
```
thinpipe tokenize --sources BOOKS... --validation-sources BOOKS... --vocab-size 4096 --output TOKENS
python -m benchmarks.own run --data TOKENS
python -m benchmarks.own report
```

Made by the last of these from the records beside it, which hold settings, versions and losses. The gap is to the dense
run of the same seed, tokens and width; all trained with AdamW at the learning rate that is best for dense of d = 256
(at d = 512 dense does better with 1e-3: see there), top-k at the better of two at half the tokens: nothing else was
tuned for any of them.
Validation: 20 batches spread over all validation books, the same for all runs.
Runs of 4.19 M tokens have products in bfloat16 and compiled blocks, those of 1.05 M and all to a loss are in float32
(compiled: boundaries, pieces, to a loss, and at d = 512 all but the pair of seed 0). The control is in float32 and
compared with itself only."""
COLOURS = {
    "keel 32x": BLUE,
    "keel 32x, reach 1": "#9ecae1",
    "keel 16x": GREEN,
    "keel 16x, reach 1": "#a1d99b",
    "keel of all channels, bf16": ORANGE,
    "keel of all channels, bf16, reach 1": "#fdbe85",
}
NAMES = {
    "keel 32x": BLUE,
    RIVAL: "#aaaaaa",
    "learned, our tables 32x": "#f768a1",
    "learned 32x": PINK,
    "bottleneck 32x": "#666666",
    "subspace 32x": GREEN,
    "lowrank 32x": PURPLE,
    "topk 32x": ORANGE,
}
OF_ALL: Families = {
    "the keel": ("keel {}x", "#b30000", "P"),
    "learned projector": ("learned {}x", "#a6761d", ">"),
    "bottleneck": ("bottleneck {}x", "#666666", "<"),
    "bottleneck with our tables": ("bottleneck, our tables {}x", "#aaaaaa", "X"),
    **FAMILIES,
}
"""Lines of the Pareto plot that has the methods of both studies."""


def report(output: Path) -> None:
    results = read_results(output)
    dense = Dense(results)
    same_rate = [result for result in results if result.lr == DENSE.lr]
    wide = Dense(same_rate, "dense, d = 512")
    same_schedule = [result for result in results if result.question != QUESTION]
    narrow = [result for result in same_schedule if "d = 512" not in result.name and dense.has(result)]
    twice = [result for result in same_schedule if "d = 512" in result.name and wide.has(result)]
    if not narrow:
        print("no finished runs yet: python -m benchmarks.own run --data TOKENS")
        return
    full = DENSE.nbytes_per_token
    lines = ["# The keel against dense and against the others", "", READ_THIS, ""]
    lines += [*seeds_table(narrow, dense, full), *over_tokens_table(narrow, dense, COLOURS)]
    lines += [*control_table(output), *boundary_cost_table(narrow), *questions_tables(narrow, dense, full)]
    if twice:
        full_twice = replace(DENSE, shape=WIDE).nbytes_per_token
        lines += questions_tables(twice, wide, full_twice)
        of_seeds = [result for result in twice if result in same_rate]
        lines += seeds_table(of_seeds, wide, full_twice, "Over seeds, d = 512")
    ours = keel(32)
    lines += [*tokens_table(results, ours.name), *tokens_table(results, RIVAL)]
    lines += time_table(results, read_times(output), ours.name, full / ours.nbytes_per_token, RATES)
    text = "\n".join([*lines, ""])
    (output / "own.md").write_text(text)
    draw_over_tokens(narrow, dense, output / "over_tokens.png", COLOURS)
    if any(result.name in NAMES for result in narrow):
        draw_methods(narrow, dense, output / "methods.png")
    draw_all(narrow, dense, read_results(output.parent / "convergence"), output / "pareto.png")
    print(text)


def draw_all(ours: list[Result], dense: Dense, papers: list[Result], path: Path) -> None:
    """The methods of both studies, each run against the dense one of its own study, where the keel was run as long.

    No lines: rates, products and seeds differ between the points of a method."""
    of_both = compared(ours, dense) + compared(papers, Dense(papers))
    lengths = {result.tokens for result in ours if result.name.startswith("keel")}
    shown = [(result, gap) for result, gap in of_both if result.tokens in lengths]
    if shown:
        draw_pareto(shown, path, OF_ALL, line="none")


def boundary_cost_table(results: list[Result]) -> list[str]:
    """Tables make a better model than dense is, so the gap to dense does not say what is lost at boundaries."""
    lines = list[str]()
    for suffix in ("", ", reach 1"):
        whole = Dense(results, f"{WHOLE.name}{suffix}")
        both = [f"keel {ratio}x{suffix}" for ratio in (16, 32)]
        heading = (
            f"## What is lost at boundaries{suffix}",
            "",
            "Against the same model and tables, of which all channels cross, in bf16: %, nats, bits/byte.",
        )
        lines += over_tokens_table([result for result in results if whole.has(result)], whole, both, heading)
    return lines


def draw_methods(results: list[Result], dense: Dense, path: Path) -> None:
    """The gap of every method at 32 times fewer bytes, a panel for each number of tokens."""
    plt = pyplot()
    shown = [result for result in results if result.name in NAMES and not result.diverged]
    budgets = sorted({result.tokens for result in shown})
    figure, panels = plt.subplots(1, len(budgets), figsize=(5 * len(budgets), 3.4), layout="constrained", squeeze=False)
    for axes, tokens in zip(panels[0], budgets, strict=True):
        gaps: dict[str, list[float]] = defaultdict(list)
        for result in shown:
            if result.tokens == tokens:
                gaps[result.name].append(dense.gap(result).percent)
        names = sorted(gaps, key=lambda name: mean(gaps[name]))
        for place, name in enumerate(names):
            middle, low, high = mean(gaps[name]), min(gaps[name]), max(gaps[name])
            axes.barh(place, middle, color=NAMES[name], height=0.65)
            axes.hlines(place, low, high, color="#222222", linewidth=2)
            axes.annotate(f"{middle:+.1f}", (max(high, 0), place), (3, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(names)), [name.removesuffix(" 32x") for name in names])
        axes.invert_yaxis()
        axes.axvline(0, color="#444444", linewidth=1)
        axes.margins(x=0.12)
        axes.set(xlabel="validation loss above dense, %", title=f"32 times fewer bytes, {tokens / 1e6:.2f} M tokens")
        finish(axes)
    figure.savefig(path, dpi=130)
    plt.close(figure)
