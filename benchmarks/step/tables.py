"""The result of `python -m benchmarks.step` for people: tables, and in words what they show."""

from rich.console import Console
from rich.table import Table

from benchmarks.step.results import TARGET_COMPRESSION, Growth, StepResult

MIB = 2**20


def print_result(result: StepResult, console: Console) -> None:
    for table in (_models(result), _comparisons(result), *(_growth(growth) for growth in result.growth)):
        console.print(table)
    for line in (*_growth_words(result), *_target_words(result)):
        console.print(line, highlight=False, soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _models(result: StepResult) -> Table:
    title = "Models" if result.config["device"] == "cuda" else f"Models ({result.threads} threads)"
    table = _table(title, "model", "MLP width", "trainable", "of dense", "optimiser MiB", "of dense")
    dense = result.variants[0]
    for facts in result.variants:
        table.add_row(
            facts.name,
            str(facts.hidden_dim),
            f"{facts.trainable:,}",
            f"{facts.trainable / dense.trainable:.3f}",
            f"{facts.optimizer_nbytes / MIB:.1f}",
            f"{facts.optimizer_nbytes / dense.optimizer_nbytes:.3f}",
        )
    return table


def _comparisons(result: StepResult) -> Table:
    pairs, coverage = result.config["pairs"], result.comparisons[0].time.coverage
    table = _table(
        f"One training step, subspace / dense: median of {pairs} interleaved pairs, "
        f"{coverage:.1%} order-statistic interval",
        "model", "batch x seq", "dense s", "subspace s", "time ratio", "interval", "peak MiB", "of dense",
    )  # fmt: skip
    for entry in result.comparisons:
        time = entry.time
        table.add_row(
            entry.variant,
            f"{entry.batch} x {entry.seq}",
            f"{time.first_median_seconds:.3f}",
            f"{time.second_median_seconds:.3f}",
            f"{time.median:.3f}",
            f"{time.low:.3f} - {time.high:.3f}",
            f"{entry.peak_nbytes / MIB:.0f}",
            f"{entry.peak_ratio:.3f}",
            end_section=entry.seq == result.config["seqs"][-1],
        )
    return table


def _growth(growth: Growth) -> Table:
    table = _table(
        f"Memory at batch {growth.batch}, k={growth.width}, same shape (MiB)",
        "seq", "dense peak", "subspace peak", "difference", "dense activations", "subspace activations", "difference",
    )  # fmt: skip
    for index, seq in enumerate(growth.seqs):
        table.add_row(
            str(seq),
            f"{growth.dense_peaks_nbytes[index] / MIB:.1f}",
            f"{growth.peaks_nbytes[index] / MIB:.1f}",
            f"{growth.peak_overheads_nbytes[index] / MIB:+.1f}",
            f"{growth.dense_activations_nbytes[index] / MIB:.1f}",
            f"{growth.activations_nbytes[index] / MIB:.1f}",
            f"{growth.activation_overheads_nbytes[index] / MIB:+.2f}",
        )
    return table


def _growth_words(result: StepResult) -> list[str]:
    lines = []
    for growth in result.growth:
        rows = growth.activation_rows_per_token(result.config["dim"])
        verdict = "grows" if growth.grows(result.config["dim"]) else "does not grow"
        peaks = growth.peak_overheads_nbytes
        lines.append(
            f"k={growth.width}: what the subspace model keeps for the backward pass beyond the dense one {verdict} "
            f"with the sequence length ({rows:+.3f} d-wide rows per token); its peak differs by "
            f"{peaks[0] / MIB:+.0f} MiB at {growth.seqs[0]} and {peaks[-1] / MIB:+.0f} MiB at {growth.seqs[-1]} tokens."
        )
    return lines


def _target_words(result: StepResult) -> list[str]:
    lines = []
    for target in result.targets:
        verdict = "reached" if target.reached else "NOT REACHED"
        doubt = f", but the interval goes up to {target.high:.3f}" if target.reached and not target.certain else ""
        lines.append(
            f"target, k = d/{TARGET_COMPRESSION}, same shape: {target.name} <= {target.limit:.2f} of dense: "
            f"{target.value:.3f}, {verdict}{doubt}"
        )
    return lines
