"""The tables of the study, from nothing but the records of its finished runs."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.convergence.figures import draw_learning_rates, draw_pareto
from benchmarks.convergence.gaps import FINALISTS, draw_boundaries, draw_over_tokens, draw_pieces, longest_of
from benchmarks.convergence.results import Dense, Gap, Result, best_of_learning_rates, compared, read_results
from benchmarks.convergence.runs import DENSE

READ_THIS = """\
```
thinpipe tokenize --sources BOOKS... --validation-sources BOOKS... --vocab-size 4096 --output TOKENS
python -m benchmarks.convergence run --data TOKENS
python -m benchmarks.convergence report
```

Made by the last of these from the records beside it, which hold settings, versions and losses.
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
    draw_pareto(compared(results, dense), output / "pareto.png")
    draw_learning_rates(results, output / "learning_rates.png")
    draw_boundaries(results, dense, output / "boundaries.png")
    draw_over_tokens(results, dense, output / "over_tokens.png")
    draw_pieces(results, dense, output / "pieces.png")
    print(text)


def tables(results: list[Result], dense: Dense) -> str:
    full = DENSE.nbytes_per_token
    return "\n".join(
        [
            "# What each boundary method costs in loss",
            "",
            READ_THIS,
            "",
            *questions_tables(results, dense, full),
            *seeds_table(results, dense, full),
            *over_tokens_table(results, dense),
            "",
        ]
    )


def questions_tables(results: list[Result], dense: Dense, full: float) -> list[str]:
    lines = list[str]()
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
    return lines


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


def seeds_table(results: list[Result], dense: Dense, full: float, title: str = "Over seeds") -> list[str]:
    """Runs with several seeds, each against the dense run of its own."""
    by_name: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in best_of_learning_rates(results):
        if not result.diverged:
            by_name[result.name, result.tokens].append(result)
    several = {key: same for key, same in by_name.items() if len(same) > 1}
    if not several:
        return []
    lines = [
        f"## {title}",
        "",
        "The gap of each run to the dense run of its seed; in brackets the least and the largest.",
        "",
        "| run | M tokens | fewer bytes | seeds | validation loss | gap, % | gap, nats | gap, bits/byte |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for (name, tokens), same in sorted(several.items(), key=lambda item: item[0][::-1]):
        gaps = [dense.gap(result) for result in same]
        lines.append(
            f"| {name} | {tokens / 1e6:.2f} | {full / same[0].bytes_per_token:.1f}x | {len(same)} | "
            f"{mean(r.loss for r in same):.4f} | {spread([gap.percent for gap in gaps])} | "
            f"{spread([gap.nats for gap in gaps], 3)} | {spread([gap.bits_per_byte for gap in gaps], 3)} |"
        )
    return [*lines, ""]


OVER_TOKENS = (
    "## Over tokens",
    "",
    "The gap at each validation of the longest runs, mean over seeds: %, nats, bits/byte. Dense is on the same "
    "schedule, so before the last of a row the rate is still high.",
)


def over_tokens_table(
    results: list[Result], dense: Dense, names: Iterable[str] = FINALISTS, heading: Sequence[str] = OVER_TOKENS
) -> list[str]:
    """The longest runs of these on their way: mean over seeds."""
    curves = {
        name: [dense.gaps_over_tokens(result) for result in same] for name, same in longest_of(results, names).items()
    }
    if not curves:
        return []
    places = sorted({at for same in curves.values() for curve in same for at in curve})
    lines = [
        *heading,
        "",
        "| run | seeds | " + " | ".join(f"{at / 1e6:.2f} M" for at in places) + " |",
        "|---|---:|" + "---:|" * len(places),
    ]
    for name, same in curves.items():
        cells = (mean_gap([curve[at] for curve in same]) if all(at in curve for curve in same) else "" for at in places)
        lines.append(f"| {name} | {len(same)} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def mean_gap(gaps: list[Gap]) -> str:
    return (
        f"{mean(gap.percent for gap in gaps):+.2f} %, {mean(gap.nats for gap in gaps):+.3f}, "
        f"{mean(gap.bits_per_byte for gap in gaps):+.3f}"
    )


def spread(values: list[float], digits: int = 2) -> str:
    least, middle, most = (f"{value:+.{digits}f}" for value in (min(values), mean(values), max(values)))
    return f"{middle} ({least} … {most})"
