"""Style and file formats of report figures (needs the extra `report`).

A figure is drawn once. As PNG it has a white background; as inline SVG its ink takes the text colour of the page, so it
is readable in dark mode too.
"""

import io
import re
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinpipe.core.extras import require_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#23262b"
"""Colour of text and axes; in SVG it is replaced by the page's text colour."""
BLUE, ORANGE, GREEN, GREY = "#3a86c8", "#e0792b", "#2f9e77", "#8d949e"
RUN_COLOURS = (BLUE, ORANGE, GREEN, "#8f7fd0", "#dd5fa0", GREY)
"""Colours of several runs, visible on white and on black."""
COLOURS = ("#08519c", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#666666")
"""Colours for figures with a white background."""
MAX_POINTS = 1500
"""Maximum points of a curve: more are not visible and would make a page of megabytes."""


def pyplot() -> Any:
    """matplotlib.pyplot with the file-only backend Agg. Raises UserError if matplotlib is not installed."""
    require_extra("matplotlib", extra="report", feature="a figure")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def new_figure(height: float = 3.1) -> tuple["Figure", Any]:
    """Figure of 5.2 inches by `height` with 9-point text, readable on phones, and its axes."""
    plt = pyplot()
    with plt.rc_context({"font.size": 9, "axes.labelcolor": INK, "text.color": INK}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
    style_axes(axes)
    return figure, axes


def style_axes(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)


def legend(axes: Any, **settings: Any) -> None:
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, **settings)


def time_unit(longest_s: float) -> tuple[str, int]:
    """Unit of a time axis that reaches to `longest_s` seconds: its name and its length in seconds."""
    if longest_s > 3 * 3600:
        return "hours", 3600
    return ("minutes", 60) if longest_s > 180 else ("seconds", 1)


def decimation(count: int) -> slice:
    """Slice that keeps at most `MAX_POINTS` of `count` points."""
    return slice(None, None, -(-count // MAX_POINTS))


def save_png(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=150, facecolor="white")


def inline_svg(figure: "Figure", name: str, label: str) -> str:
    """SVG element for a page with several figures: `name` prefixes its ids. `label` is the text for screen readers."""
    plt, drawn = pyplot(), io.StringIO()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(drawn, format="svg", transparent=True)
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg).replace(INK, "currentColor")
    return re.sub(r'^<svg[^>]*viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" aria-label="{label}">', svg)


def smoothing_width(count: int) -> int:
    """Window of the moving average for `count` values: about a twentieth, odd, 5 to 201; 1 for fewer than 10."""
    return 2 * min(100, max(2, count // 40)) + 1 if count >= 10 else 1


def smoothed(places: Sequence[float], values: Sequence[float], width: int) -> tuple[list[float], list[float]]:
    """Centred moving average: window centres (from `places`) and means. Leaves a straight line unchanged."""
    sums, half = [0.0, *accumulate(values)], width // 2
    means = [(sums[start + width] - sums[start]) / width for start in range(len(values) - width + 1)]
    return list(places[half : half + len(means)]), means
