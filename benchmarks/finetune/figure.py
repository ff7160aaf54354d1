"""Draws the fine-tunings: what is compressed and how strongly, and what becomes of it without compression."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.finetune.results import Results
from thinpipe.report.figures import COLOURS, pyplot

BLUE, ORANGE, GREEN, PURPLE, PINK, _ = COLOURS
SHARES, BITS = ("5%", "10%", "20%", "30%", "50%"), ("2", "4", "8")

Families = Mapping[str, tuple[str, str, str]]
"""Lines of a panel by label: names of the runs, colour, marker."""

TOPK: Families = {
    "states only": ("topk {} states", BLUE, "o"),
    "gradients only": ("topk {} gradients", ORANGE, "s"),
    "both, mask reused": ("topk {} both, mask reused", GREEN, "^"),
    "both, own masks": ("topk {} both, own masks", PURPLE, "v"),
}
QUANTISE: Families = {
    "states only": ("quantise {} bit states", BLUE, "o"),
    "gradients only": ("quantise {} bit gradients", ORANGE, "s"),
    "both": ("quantise {} bit both", GREEN, "^"),
    "states with AQ-SGD, gradients 8 bit": ("quantise {} bit AQ-SGD", PINK, "D"),
}
AQSGD: Families = {
    "both, mask reused": ("topk {} both, mask reused", GREEN, "^"),
    "the same, states with AQ-SGD": ("topk {} AQ-SGD, mask reused", PINK, "D"),
}
SWITCHED = (
    *(f"topk {share} both, mask reused" for share in reversed(SHARES)),
    "topk 10% both, own masks",
    "topk 10% EF, own masks",
    "topk 10% EF, mask reused",
    "topk 10% EF21, own masks",
    "topk 10% EF21, mask reused",
    "topk 30% AQ-SGD, mask reused",
    "topk 10% AQ-SGD, mask reused",
    "quantise 4 bit states",
    "quantise 2 bit states",
)


def draw(results: Results, path: Path) -> None:
    plt = pyplot()
    figure, ((shares, bits), (switch, samples)) = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    for axes, ticks, families in ((shares, SHARES, TOPK), (bits, BITS, QUANTISE), (samples, SHARES, AQSGD)):
        draw_lines(axes, results, ticks, families)
    shares.set(xlabel="numbers kept", title="TopK")
    bits.set(xlabel="bits of a number", title="Quantisation")
    samples.set(xlabel="numbers kept", title="TopK with AQ-SGD")
    draw_switch(switch, results)
    for axes in (shares, bits, switch, samples):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.supxlabel(
        "Means of three seeds, bars from least to most; without a bar: one seed, or too small to see.", fontsize=8
    )
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_lines(axes: Any, results: Results, ticks: Sequence[str], families: Families) -> None:
    """Over evenly spaced ticks, with the range over seeds."""
    for label, (pattern, colour, marker) in families.items():
        found = [(at, results.measured(pattern.format(tick)).best) for at, tick in enumerate(ticks)]
        points = [(at, values) for at, values in found if values]
        if not points:
            continue
        middle = [mean(values) for _, values in points]
        below = [at - min(values) for at, (_, values) in zip(middle, points, strict=True)]
        above = [max(values) - at for at, (_, values) in zip(middle, points, strict=True)]
        places = [at for at, _ in points]
        axes.errorbar(places, middle, yerr=(below, above), color=colour, marker=marker, capsize=3, label=label)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_xlim(-0.3, len(ticks) - 0.7)
    axes.axhline(results.before, color="#444444", linewidth=1, linestyle=":", label="before fine-tuning")
    axes.axhline(results.judge.uncompressed, color="#444444", linewidth=1, label="uncompressed")
    axes.set(ylabel="validation loss, the better of on and off")
    room = 0.1 * results.gain
    axes.set_ylim(min(results.measured("uncompressed").best) - room, max(results.before, axes.dataLim.y1) + room)
    axes.legend(frameon=False, fontsize=8)


def draw_switch(axes: Any, results: Results) -> None:
    """One row for each method: its loss with compression on and off at inference."""
    names = [name for name in SWITCHED if results.measured(name).on]
    for row, name in enumerate(names):
        measured = results.measured(name)
        on, off = mean(measured.on), mean(measured.off)
        axes.plot([on, off], [row, row], color="#bbbbbb", linewidth=2, zorder=1)
        for at, colour, label in ((on, BLUE, "on"), (off, ORANGE, "off")):
            axes.plot(at, row, "o", color=colour, markersize=7, label=label if row == 0 else None)
    axes.axvline(results.judge.uncompressed, color="#444444", linewidth=1)
    axes.axvline(results.before, color="#444444", linewidth=1, linestyle=":")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="validation loss, nats per token", title="Compression on and off at inference")
    if names:
        axes.legend(frameon=False, fontsize=8, title="at inference", title_fontsize=8)
