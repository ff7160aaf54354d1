"""How figures of a report look, and how they become files (needs the extra `report`).

A figure is drawn once. As a PNG it has a white ground; as SVG within a page its ink is that of the page, so that it
can be read in the dark too.
"""

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinpipe.core.extras import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#23262b"
"""Text and axes; in SVG it becomes the colour of the text around."""
BLUE, ORANGE, GREEN, GREY = "#3a86c8", "#e0792b", "#2f9e77", "#8d949e"
RUN_COLOURS = (BLUE, ORANGE, GREEN, "#8f7fd0", "#dd5fa0", GREY)
"""For several runs. All can be seen on white and on black."""
COLOURS = ("#08519c", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#666666")
"""For figures on white alone."""
MOST_POINTS = 1500
"""Of a line: more cannot be seen, and would make a page of megabytes."""


def pyplot() -> Any:
    """matplotlib's, for files."""
    need("matplotlib", extra="report", what="a figure")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def new_figure(height: float = 3.1) -> tuple["Figure", Any]:
    """Small, with text of 9 points: it is read on phones as well."""
    plt = pyplot()
    with plt.rc_context({"font.size": 9, "axes.labelcolor": INK, "text.color": INK}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, height), layout="constrained")
        axes = figure.subplots()
    plain(axes)
    return figure, axes


def plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(color=GREY, alpha=0.25, linewidth=0.7)
    axes.set_axisbelow(True)


def legend(axes: Any, **settings: Any) -> None:
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, **settings)


def thinned(count: int) -> slice:
    """Which of so many points to draw."""
    return slice(None, None, -(-count // MOST_POINTS))


def save_png(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=150, facecolor="white")


def inline_svg(figure: "Figure", name: str, label: str) -> str:
    """For a page that has other figures too: `name` keeps their ids apart. `label` is for those who cannot see it."""
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
