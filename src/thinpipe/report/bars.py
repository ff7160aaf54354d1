"""Where the time of each process went, as stacked bars."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from thinpipe.report.figures import BLUE, GREEN, GREY, ORANGE, legend, new_figure
from thinpipe.report.time_spent import TimeSpent

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def time_figure(spent: Mapping[str, TimeSpent], beside: float) -> "Figure":
    """`beside`: seconds of validation and saving, in which all take part."""
    names = list(spent)
    figure, axes = new_figure(1.1 + 0.34 * len(names))
    longest = max(each.total for each in spent.values()) + beside
    unit, length = ("hours", 3600) if longest > 3 * 3600 else ("minutes", 60) if longest > 180 else ("seconds", 1)
    parts = (
        ("computing", BLUE, [spent[name].computing for name in names]),
        ("waiting for messages", ORANGE, [spent[name].waiting for name in names]),
        ("rest of the steps", GREY, [spent[name].rest for name in names]),
        ("validating and saving", GREEN, [beside] * len(names)),
    )
    left = [0.0] * len(names)
    for label, colour, seconds in parts:
        lengths = [each / length for each in seconds]
        if any(lengths):
            axes.barh(names, lengths, left=left, color=colour, label=label, height=0.62)
        left = [start + width for start, width in zip(left, lengths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=unit)
    legend(axes, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2)
    return figure
