"""Several runs in one picture: the loss over the time they took, and how fast they went."""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from thinpipe.core.errors import UserError
from thinpipe.report.curve import pyplot, smoothed
from thinpipe.report.summary import Summary

COLOURS = ("#08519c", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#666666")


def compare(runs: Mapping[str, Summary]) -> list[str]:
    """One line for each run, the fastest first."""
    speeds = sorted(((summary.tokens_per_second, name) for name, summary in runs.items()), reverse=True)
    slowest = speeds[-1][0]
    width = max(map(len, runs))
    return [
        f"{name:<{width}}  {speed:>10,.0f} tokens/s  {speed / slowest:5.1f}x  "
        f"{runs[name].nbytes_per_token:>8,.0f} bytes/token  loss {runs[name].steps[-1].loss:.4f}"
        for speed, name in speeds
    ]


def draw_comparison(runs: Mapping[str, Summary], path: Path) -> None:
    plt = pyplot()
    if len(runs) > len(COLOURS):
        raise UserError(f"{len(runs)} runs are too many for one picture: name at most {len(COLOURS)}")
    figure, (losses, speeds) = plt.subplots(
        1, 2, figsize=(9, 4), layout="constrained", gridspec_kw={"width_ratios": [3, 1]}
    )
    for colour, (name, summary) in zip(COLOURS, runs.items(), strict=False):
        seconds = list(accumulate(step.seconds for step in summary.steps))
        loss = smoothed([step.loss for step in summary.steps])
        losses.plot(seconds, loss, color=colour)
        losses.annotate(
            name, (seconds[-1], loss[-1]), xytext=(5, 0), textcoords="offset points", color=colour, va="center"
        )
    names = list(runs)
    bars = speeds.bar(names, [runs[name].tokens_per_second for name in names], color=COLOURS[: len(names)])
    speeds.bar_label(bars, fmt="{:,.0f}")
    losses.set(xlabel="seconds", ylabel="training loss, nats per token", title="loss over time")
    losses.margins(x=0.12)
    speeds.set(title="tokens per second", yticks=[])
    for axes in (losses, speeds):
        axes.spines[["top", "right"]].set_visible(False)
    losses.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
    plt.close(figure)
