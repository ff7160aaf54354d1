"""A step of a plan as a timeline: a row for each machine and for each line (needs the extra `report`)."""

from pathlib import Path

from thinpipe.plan.draft import Draft, load_of
from thinpipe.report.figures import pyplot

_COLOURS = {
    "forward": "#3182bd",
    "backward": "#08519c",
    "input": "#08519c",
    "weight": "#6baed6",
    "optimiser": "#636363",
    "send": "#d95f02",
}
_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, inputs",
    "weight": "backward, weights",
    "optimiser": "optimiser",
    "send": "on the line",
}
_HEIGHT = 0.8


def draw(plan: Draft, path: Path) -> None:
    plt = pyplot()
    names = [part.machine.name for part in plan.parts]
    lines = list(plan.timeline.line_busy)
    rows = [f"process {index}" for index in range(len(names))] + lines
    labels = names + [plan.say(load_of(line, 0.0)).removeprefix("the ") for line in lines]
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.32 * len(rows)), layout="constrained")
    axes.barh(range(len(names)), plan.timeline.seconds, height=_HEIGHT, color="#eeeeee", label="waits")
    by_kind: dict[str, list[tuple[int, float, float]]] = {}
    for span in plan.timeline.spans:
        row = rows.index(span.line) if span.what == "send" else span.process
        by_kind.setdefault(span.what, []).append((row, span.start, span.end - span.start))
    for kind, spans in by_kind.items():
        axes.barh(
            [row for row, _, _ in spans],
            [width for _, _, width in spans],
            left=[start for _, start, _ in spans],
            height=_HEIGHT,
            color=_COLOURS[kind],
            edgecolor="white",
            linewidth=0.4,
            label=_WORDS[kind],
        )
    axes.set_yticks(range(len(rows)), labels)
    axes.axhline(len(names) - 0.5, color="#bdbdbd", linewidth=0.8)
    axes.set(
        xlabel="seconds",
        title=f"one step: {plan.tokens_per_second:,.0f} tokens/s, machines wait for {plan.timeline.bubble:.0%}",
        xlim=(0, plan.timeline.seconds),
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    figure.legend(frameon=False, ncols=len(by_kind) + 1, loc="outside lower center")
    figure.savefig(path, dpi=130)
    plt.close(figure)
