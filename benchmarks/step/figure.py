"""Draws the result of `python -m benchmarks.step`. Needs matplotlib (the extra `report`), imported only when asked
for."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.step.results import TARGET_OPTIMIZER_RATIO, TARGET_TIME_RATIO, StepResult
from thinpipe.core.extras import require_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
DENSE_COLOUR = "#555555"
TARGET_COLOUR = "#b03030"
COLOURS = ("#0b6e99", "#e08e0b", "#5b8c3e", "#9a4c95")
"""One per subspace width; more widths than colours start over."""


def draw(result: StepResult, path: Path) -> None:
    """Times above (same shape, same trainable count), memory below (optimiser, peak over the sequence length)."""
    require_extra("matplotlib", extra="report", feature="a figure")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    (same_shape, same_count), (optimizer, peak) = figure.subplots(2, 2)
    _draw_times(same_shape, result, "shape")
    same_shape.set_title("Step time, same shape")
    same_shape.axhline(TARGET_TIME_RATIO, color=TARGET_COLOUR, linestyle="--", linewidth=1.2, label="target", zorder=3)
    _draw_times(same_count, result, "count")
    same_count.set_title("Step time, same number of trainable weights")
    _draw_optimizer(optimizer, result)
    _draw_peaks(peak, result)
    for axes in (same_shape, same_count, optimizer, peak):
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = same_shape.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, ncols=len(labels), loc="outside upper center")
    figure.savefig(path, dpi=150)


def _draw_times(axes: "Axes", result: StepResult, match: str) -> None:
    widths, seqs = _widths(result), result.config["seqs"]
    for index, width in enumerate(widths):
        chosen = [entry for entry in result.comparisons if entry.width == width and entry.match == match]
        middles = [entry.time.median for entry in chosen]
        whiskers: Any = (
            [entry.time.median - entry.time.low for entry in chosen],
            [entry.time.high - entry.time.median for entry in chosen],
        )
        bar_width = 0.8 / len(widths)
        places = [place - 0.4 + bar_width * (index + 0.5) for place in range(len(seqs))]
        axes.bar(places, middles, bar_width * 0.92, color=_colour(index), label=_width_name(result, width))
        axes.errorbar(places, middles, whiskers, fmt="none", color="black", capsize=3, linewidth=1, zorder=4)
        for place, entry in zip(places, chosen, strict=True):
            axes.text(place, 0.03, f"{entry.time.median:.2f}", ha="center", color="white", fontsize=9)
    axes.axhline(1.0, color=DENSE_COLOUR, linewidth=1.2, label="dense", zorder=3)
    axes.set_xticks(range(len(seqs)), [str(seq) for seq in seqs])
    axes.set_xlabel("sequence length")
    axes.set_ylabel("subspace / dense")
    axes.set_ylim(0, 1.05 * max(1.0, *(entry.time.high for entry in result.comparisons)))  # the same in both panels


def _draw_optimizer(axes: "Axes", result: StepResult) -> None:
    widths = _widths(result)
    dense = result.variants[0]
    ordered = sorted(result.variants, key=lambda facts: (facts.width is not None, facts.match == "count"))
    for place, facts in enumerate(ordered):
        colour = DENSE_COLOUR if facts.width is None else _colour(widths.index(facts.width))
        size = facts.optimizer_nbytes / MIB
        axes.bar(place, size, 0.7, color=colour)
        share = f"{facts.optimizer_nbytes / dense.optimizer_nbytes:.2f}"
        axes.text(place, size, share, ha="center", va="bottom", fontsize=9)
    target = TARGET_OPTIMIZER_RATIO * dense.optimizer_nbytes / MIB
    # The target is for the same shape: those bars come right after the dense one.
    axes.hlines(target, 0.5, 0.5 + len(widths), color=TARGET_COLOUR, linestyle="--", linewidth=1.2)
    names = ["dense" if facts.width is None else f"k={facts.width}\nsame {facts.match}" for facts in ordered]
    axes.set_xticks(range(len(ordered)), names)
    axes.set_ylabel("MiB")
    axes.set_title("Optimiser state")


def _draw_peaks(axes: "Axes", result: StepResult) -> None:
    for index, growth in enumerate(result.growth):
        if index == 0:
            dense = [nbytes / MIB for nbytes in growth.dense_peaks_nbytes]
            axes.plot(growth.seqs, dense, "o-", color=DENSE_COLOUR)
        own = [nbytes / MIB for nbytes in growth.peaks_nbytes]
        marker = "os^v"[index % 4]
        axes.plot(growth.seqs, own, f"{marker}-", color=_colour(index))
    axes.set_xticks(result.config["seqs"])
    axes.set_ylim(bottom=0)
    axes.set_xlabel(f"sequence length (batch {result.config['memory_batch']})")
    axes.set_ylabel("MiB")
    axes.set_title("Peak memory of a step, same shape")


def _widths(result: StepResult) -> list[int]:
    return [growth.width for growth in result.growth]


def _width_name(result: StepResult, width: int) -> str:
    compression = result.config["compressions"][_widths(result).index(width)]
    return f"k={width} (d/{compression})"


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
