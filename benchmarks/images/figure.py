"""The study in one figure: what strength costs in either direction, and what switching it off at inference costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from msgspec.structs import replace

from benchmarks.images.claims import Results, Scores
from benchmarks.images.settings import BITS, KEPT, KEPT_WITH_FEEDBACK, UNCOMPRESSED, WHERE, Feedback, Setting

COLOURS = {"activations": "#0b6e99", "gradients": "#e08e0b", "both": "#555555", "both, one mask": "#9a4c95"}
FEEDBACKS: dict[Feedback, tuple[str, str]] = {
    "none": ("plain", "#555555"),
    "ef": ("EF", "#e08e0b"),
    "ef21": ("EF21", "#5b8c3e"),
    "aqsgd": ("AQ-SGD", "#0b6e99"),
}


def draw(results: Results, path: Path) -> None:
    figure = Figure(figsize=(15, 5.2), layout="constrained")
    panels: Any = figure.subplots(1, 3)
    panels[1].sharey(panels[0])
    topk, quantised = Setting(kind="topk"), Setting(kind="quantise")
    draw_directions(panels[0], results, topk, KEPT)
    draw_directions(panels[1], results, quantised, BITS)
    draw_inference(panels[2], results, topk)
    panels[0].set_title("TopK: what is compressed")
    panels[1].set_title("Quantisation: what is compressed")
    panels[2].set_title("TopK of both: compression at inference on or off")
    panels[0].set_ylabel("test loss (lower is better)")
    none = results.on[UNCOMPRESSED]
    for axes, levels in zip(panels, (KEPT, BITS, KEPT), strict=True):
        finish(axes, none, levels)
    seeds = len(none.losses)
    what = f"means of {seeds} seeds, shades from least to most" if seeds > 1 else "one seed"
    figure.suptitle(f"A ResNet cut in four learns digits: {what}")
    figure.savefig(path, dpi=130)


def draw_directions(axes: Any, results: Results, base: Setting, levels: Sequence[float]) -> None:
    for where in (*WHERE, "both, one mask"):
        settings = [replace(base, where=where, level=level) for level in levels]
        if settings[0] in results.on:
            line(axes, levels, [results.on[setting] for setting in settings], COLOURS[where], label=where)


def draw_inference(axes: Any, results: Results, base: Setting) -> None:
    for feedback, (name, colour) in FEEDBACKS.items():
        levels = KEPT if feedback == "none" else KEPT_WITH_FEEDBACK
        settings = [replace(base, feedback=feedback, level=level) for level in levels]
        line(axes, levels, [results.on[setting] for setting in settings], colour, label=f"{name}, on")
        line(axes, levels, [results.off[setting] for setting in settings], colour, label=f"{name}, off", style="--")


def line(
    axes: Any, levels: Sequence[float], scores: Sequence[Scores], colour: str, *, label: str, style: str = "-"
) -> None:
    axes.plot(levels, [each.loss for each in scores], f"o{style}", color=colour, label=label, markersize=4)
    low, high = [min(each.losses) for each in scores], [max(each.losses) for each in scores]
    axes.fill_between(levels, low, high, color=colour, alpha=0.12, linewidth=0)


def finish(axes: Any, uncompressed: Scores, levels: Sequence[float]) -> None:
    """Strength grows to the right."""
    axes.axhspan(min(uncompressed.losses), max(uncompressed.losses), color="#000000", alpha=0.12, linewidth=0)
    axes.axhline(uncompressed.loss, color="#000000", linewidth=1, linestyle=":", label="no compression")
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [f"{tick:g}" for tick in shown])
    names = [f"{level:.0%}" if level < 1 else f"{level:g} bits" for level in levels]
    axes.set_xticks(levels, names)
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel("kept of each image's numbers" if levels[0] < 1 else "of each number")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5)
