"""The control: what a keel costs against the same model with all channels across, beside what it costs against dense.

A keel has token tables and look-back that plain dense has not, and they lower the loss. The gap to dense is therefore
the sum of two: what tables and look-back gain, and what the boundary takes. All twelve runs are in one precision.
"""

from collections import defaultdict
from pathlib import Path

from benchmarks.convergence.execute import is_done
from benchmarks.convergence.report import spread
from benchmarks.convergence.results import Gap, Result, read_control
from benchmarks.own.runs import DENSE, SEEDS, WHOLE, control, keel

SYMBOLS = {"D": DENSE.name, "D+": WHOLE.name, "K16": keel(16).name, "K32": keel(32).name}
PAIRS = (("D+", "D"), ("K16", "D"), ("K32", "D"), ("K16", "D+"), ("K32", "D+"))
HEADING = """\
## Control: what the boundary costs

D: dense. D+: the keel's model with its tables and look-back, all channels across in bf16. K16, K32: keels with 16 and
32 times fewer bytes, in int4. All in float32, compiled, 4.19 M tokens. Against D+ is what the boundary costs, D+
against D what tables and look-back gain. Gaps in % of the validation loss; last row: mean (least … largest) over
seeds."""


def control_table(output: Path) -> list[str]:
    """The section of the report: a table once all runs have a record, before that the runs that have none."""
    missing = missing_runs(output)
    if missing:
        command = f"`python -m benchmarks.own run --only {next(control()).question} --data TOKENS`"
        return [HEADING, "", f"No table yet. Missing: {'; '.join(missing)}. {command} carries them out.", ""]
    results = {(result.name, result.seed): result for result in read_control(output)}
    diverged = [f"{name} (seed {seed})" for (name, seed), result in results.items() if result.diverged]
    if diverged:
        return [HEADING, "", f"No table: diverged: {'; '.join(diverged)}.", ""]
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    lines = [HEADING, "", *_header()]
    for seed in SEEDS:
        of_seed = {symbol: results[name, seed] for symbol, name in SYMBOLS.items()}
        for pair in PAIRS:
            gaps[pair].append(_percent(*(of_seed[symbol] for symbol in pair)))
        cells = [f"{of_seed[symbol].loss:.4f}" for symbol in SYMBOLS] + [f"{gaps[pair][-1]:+.2f}" for pair in PAIRS]
        lines.append(f"| {seed} | {' | '.join(cells)} |")
    means = [sum(results[name, seed].loss for seed in SEEDS) / len(SEEDS) for name in SYMBOLS.values()]
    last = [f"{loss:.4f}" for loss in means] + [spread(gaps[pair]) for pair in PAIRS]
    return [*lines, f"| mean | {' | '.join(last)} |", ""]


def missing_runs(output: Path) -> list[str]:
    """Name and seeds of each run of the control without a record."""
    seeds: dict[str, list[str]] = defaultdict(list)
    for study in control():
        if not is_done(study, output):
            seeds[study.name].append(str(study.seed))
    return [f"{name} (seed{'s' if len(each) > 1 else ''} {', '.join(each)})" for name, each in seeds.items()]


def _header() -> list[str]:
    titles = ["seed", *SYMBOLS, *(f"{one} against {other}, %" for one, other in PAIRS)]
    return [f"| {' | '.join(titles)} |", "|" + "---:|" * len(titles)]


def _percent(result: Result, baseline: Result) -> float:
    return Gap.between(result.validations[-1], baseline.validations[-1]).percent
