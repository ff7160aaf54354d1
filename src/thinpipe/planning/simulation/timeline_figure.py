"""Timeline figure of a planned step: a row for each machine and for each link (needs the extra `report`)."""

from pathlib import Path

from thinpipe.planning.planner import Plan, utilization_of
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
    "send": "on the link",
}
_HEIGHT = 0.8


def draw_timeline(plan: Plan, path: Path) -> None:
    plt = pyplot()
    names = [machine_load.machine.name for machine_load in plan.machine_loads]
    links = list(plan.timeline.link_busy)
    rows = [f"process {index}" for index in range(len(names))] + links
    labels = names + [plan.describe(utilization_of(link, 0.0)).removeprefix("the ") for link in links]
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.32 * len(rows)), layout="constrained")
    axes.barh(range(len(names)), plan.timeline.seconds, height=_HEIGHT, color="#eeeeee", label="waits")
    by_kind: dict[str, list[tuple[int, float, float]]] = {}
    for span in plan.timeline.spans:
        row = rows.index(span.link) if span.what == "send" else span.process
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
