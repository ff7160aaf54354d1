"""What the histories show: one figure with the families side by side, and a table. Verdicts follow from the data."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from matplotlib.figure import Figure

from benchmarks.rank.families import FAMILIES
from benchmarks.rank.history import Cut, History, Moment
from benchmarks.rank.spectrum import Ranks

Measure = Literal["stable", "effective"]
COLLAPSED = 0.5
"""A rank has collapsed when it falls below this part of what it was at the start."""
STABLE, EFFECTIVE = "#0b6e99", "#e08e0b"
DEPTHS = ("#9ecae1", "#4292c6", "#084594")
"""The first cut is the lightest."""
SMALL = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
WRITERS_COLUMNS = (
    "stable rank: start",
    "lowest (step)",
    "end",
    "lowest / start",
    "end / start",
    "effective rank: start",
    "end",
)


@dataclass(frozen=True)
class Group:
    """Writers of one network that may be averaged: those along the width, or those along the tokens."""

    history: History
    along: Literal["width", "tokens"] = "width"

    @property
    def names(self) -> list[str]:
        tokens = self.history.across_tokens
        return [name for name in self.history.full_ranks if (name in tokens) is (self.along == "tokens")]

    @property
    def title(self) -> str:
        family = FAMILIES[self.history.family]
        where = ", writers along the tokens" if self.along == "tokens" else ""
        return f"{family.title} ({family.kind}{where})"

    def shares(self, moment: Moment, measure: Measure) -> list[float]:
        """Ranks in parts of the largest that each could have."""
        return [getattr(moment.writers[name], measure) / self.history.full_ranks[name] for name in self.names]

    def since_start(self, moment: Moment, measure: Measure) -> list[float]:
        """Ranks in parts of what they were at the start."""
        first = self.history.moments[0].writers
        return [getattr(moment.writers[name], measure) / getattr(first[name], measure) for name in self.names]

    @property
    def lowest(self) -> tuple[float, int]:
        """The mean stable rank at its lowest, over that at the start, and when."""
        return min((fmean(self.since_start(moment, "stable")), moment.step) for moment in self.history.moments)

    @property
    def end(self) -> float:
        """The mean stable rank at the end, over that at the start."""
        return fmean(self.since_start(self.history.moments[-1], "stable"))


def groups(histories: Iterable[History]) -> list[Group]:
    both = (group for each in histories for group in (Group(each), Group(each, "tokens")))
    return [group for group in both if group.names]


def write_report(histories: Sequence[History], output: Path) -> str:
    draw(histories, output.with_suffix(".png"))
    page = "\n".join(table(histories, output.name)) + "\n"
    output.with_suffix(".md").write_text(page)
    return page


def draw(histories: Sequence[History], path: Path) -> None:
    figure: Any = Figure(figsize=(1.2 + 3.1 * len(histories), 9), layout="constrained")
    panels: Any = figure.subplots(3, len(histories), sharex=True, sharey="row", squeeze=False)
    for column, history in zip(panels.T, histories, strict=True):
        family = FAMILIES[history.family]
        column[0].set_title(f"{family.title}\n({family.kind})", fontsize=11)
        draw_writers(column[0], history)
        draw_stream(column[1], history, "stable")
        draw_stream(column[2], history, "effective")
        column[2].set_xlabel("step")
    panels[0][0].set_ylabel("matrices that write to the stream:\nrank over rank at the start")
    panels[1][0].set_ylabel("the stream at each cut:\nstable rank over width")
    panels[2][0].set_ylabel("the stream at each cut:\neffective rank over width")
    for axes in panels.flat:
        finish(axes, histories[0].moments[-1].step)
    for axes in panels[1]:
        axes.set_yscale("log")
        axes.set_yticks(SMALL, [f"{tick:.0%}" for tick in SMALL])
        axes.set_ylim(SMALL[0] * 0.7, SMALL[-1])
        axes.minorticks_off()
    for row, place in ((panels[0], "outside lower left"), (panels[1], "outside lower right")):
        handles, labels = row[0].get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, ncols=-(-len(labels) // 2), loc=place)
    figure.suptitle("Does rank collapse while a network learns?", fontsize=13)
    figure.savefig(path, dpi=120)


def finish(axes: Any, steps: int) -> None:
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, steps)
    axes.set_xticks(ticks := [tick for tick in (0, 1, 10, 100, 1000, 10_000) if tick <= steps], map(str, ticks))
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_writers(axes: Any, history: History) -> None:
    """Of those along the width: the mean of all, and from the least to the most."""
    group = Group(history)
    steps = [moment.step for moment in history.moments]
    measures: dict[Measure, str] = {"stable": STABLE, "effective": EFFECTIVE}
    for measure, colour in measures.items():
        found = [group.since_start(moment, measure) for moment in history.moments]
        axes.plot(
            steps,
            [fmean(each) for each in found],
            color=colour,
            label=f"{measure} rank of writers: mean, least to most",
        )
        axes.fill_between(steps, [min(each) for each in found], [max(each) for each in found], color=colour, alpha=0.15)
    first, last = (fmean(group.shares(history.moments[at], "stable")) for at in (0, -1))
    note = f"stable rank: {first:.0%} of the width\nat the start, {last:.0%} at the end"
    axes.text(0.04, 0.04, note, transform=axes.transAxes, fontsize=8.5, color=STABLE)


def draw_stream(axes: Any, history: History, measure: Measure) -> None:
    steps = [moment.step for moment in history.moments]
    views: dict[str, tuple[str, Callable[[Cut], Ranks]]] = {
        "without its mean": ("-", lambda cut: cut.centred),
        "whole": (":", lambda cut: cut.whole),
    }
    for index, width in enumerate(history.widths):
        for name, (style, view) in views.items():
            found = [getattr(view(moment.cuts[index]), measure) / width for moment in history.moments]
            axes.plot(
                steps, found, style, color=DEPTHS[index % len(DEPTHS)], label=f"stream at cut {index + 1}, {name}"
            )


def table(histories: Sequence[History], name: str) -> list[str]:
    four = ("whole: start", "end", "without mean: start", "end")
    return [
        "# Does rank collapse while a network learns?",
        "",
        "```",
        "thinpipe tokenize --sources BOOKS... --validation-sources BOOKS... --output tokens --vocab-size 4096",
        f"OMP_NUM_THREADS=1 python -m benchmarks.rank --data tokens --output benchmarks/results/{name}",
        "```",
        "",
        f"Raw data, settings and versions: [{name}.json]({name}.json). One seed.",
        "",
        f"![ranks over training, five families]({name}.png)",
        "",
        conclusion(histories),
        "",
        "Matrices that write to the stream, mean over all, in parts of the largest rank that each could have. A "
        "Mixer's writers along the tokens are small and are no part of the conclusion or the figure:",
        "",
        *header("family", "parameters", "loss of unseen samples", *WRITERS_COLUMNS),
        *map(writers_row, groups(histories)),
        "",
        "The stream at each cut, in parts of its width; first its stable, then its effective rank:",
        "",
        *header("family", "cut", "width", *four, *four),
        *(row for history in histories for row in stream_rows(history)),
    ]


def header(*names: str) -> tuple[str, str]:
    return line(names), line(["---", *("--:" for _ in names[1:])])


def line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def writers_row(group: Group) -> str:
    history = group.history
    first, last = history.moments[0], history.moments[-1]
    least, step = group.lowest
    bottom = next(moment for moment in history.moments if moment.step == step)
    start, low, end = (fmean(group.shares(moment, "stable")) for moment in (first, bottom, last))
    cells = (
        group.title,
        f"{history.parameters:,}",
        f"{first.loss:.2f} to {last.loss:.2f}",
        f"{start:.0%}",
        f"{low:.0%} ({step})",
        f"{end:.0%}",
        f"{least:.2f}",
        f"{group.end:.2f}",
        *(f"{fmean(group.shares(moment, 'effective')):.0%}" for moment in (first, last)),
    )
    return line(cells)


def stream_rows(history: History) -> list[str]:
    first, last = history.moments[0].cuts, history.moments[-1].cuts
    rows = []
    for index, width in enumerate(history.widths):
        found = [
            getattr(getattr(cuts[index], view), measure) / width
            for measure in ("stable", "effective")
            for view in ("whole", "centred")
            for cuts in (first, last)
        ]
        cells = (FAMILIES[history.family].title, str(index + 1), str(width), *(f"{each:.0%}" for each in found))
        rows.append(line(cells))
    return rows


def conclusion(histories: Sequence[History]) -> str:
    """By family: how far the writers' mean stable rank fell at its lowest, and where it ended."""

    def named(found: Iterable[Group]) -> str:
        each = (
            f"{FAMILIES[group.history.family].title} ({group.lowest[0]:.2f} at step {group.lowest[1]}, {group.end:.2f} "
            "at the end)"
            for group in found
        )
        return ", ".join(each) or "none"

    along_width = [Group(history) for history in histories]
    lasting = [group for group in along_width if group.end < COLLAPSED]
    return (
        f"Rule: a family's rank collapses if the mean stable rank of its writers along the width is below "
        f"{COLLAPSED:.0%} of its start at any moment that was looked at, of one seed. It does in: "
        f"{named(group for group in along_width if group.lowest[0] < COLLAPSED)}. It does not in: "
        f"{named(group for group in along_width if group.lowest[0] >= COLLAPSED)}. Still collapsed at the end: "
        f"{'all of these' if lasting and len(lasting) == len(histories) else named(lasting)}."
    )
