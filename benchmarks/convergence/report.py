"""The tables of the study, from the records of its finished runs alone."""

from collections import defaultdict
from pathlib import Path
from statistics import mean

from benchmarks.convergence.figures import draw_boundaries, draw_learning_rates, draw_over_tokens, draw_pareto
from benchmarks.convergence.results import Dense, Result, best_of_learning_rates, read_results
from benchmarks.convergence.runs import DENSE

READ_THIS = """\
Made by `python -m benchmarks.convergence report` from the records beside it, which hold settings, versions and losses.
The gap is to the dense run of the same seed and tokens at its best learning rate. Most questions have one seed: how
much another seed changes stands under "Over seeds". Rates were tuned at 16 times fewer bytes (quantised: 2 bit) and
taken over for the other ratios. Validation: 20 batches spread over all validation books, the same for all runs."""


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
    draw_boundaries(results, dense, output / "boundaries.png")
    draw_over_tokens(results, dense, output / "over_tokens.png")
    print(text)


def tables(results: list[Result], dense: Dense) -> str:
    lines = ["# What each boundary method costs in loss", "", READ_THIS, ""]
    full = DENSE.nbytes_per_token
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
