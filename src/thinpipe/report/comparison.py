"""Comparison of several runs: loss over time, throughput, and differences in loss."""

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from thinpipe.core.errors import UserError
from thinpipe.report.figures import GREY, INK, RUN_COLOURS, decimation, pyplot, smoothed, smoothing_width, style_axes
from thinpipe.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def compare(runs: Mapping[str, Summary]) -> list[str]:
    """One line of text per run, fastest first."""
    speeds = sorted(((summary.tokens_per_second, name) for name, summary in runs.items()), reverse=True)
    slowest = speeds[-1][0]
    width = max(map(len, runs))
    return [
        f"{name:<{width}}  {speed:>10,.0f} tokens/s  {speed / slowest:5.1f}x  "
        f"{runs[name].nbytes_per_token:>8,.0f} bytes/token  loss {runs[name].steps[-1].loss:.4f}"
        for speed, name in speeds
    ]


def loss_difference(mine: Summary, other: Summary) -> tuple[float, float, str]:
    """Losses of both runs at the latest point they have in common, and a description of that loss: the last validation
    that both made after the same number of tokens, else the mean training loss of the last steps up to the number of
    tokens that both have seen."""
    validated = {event.step * mine.tokens_per_step: event.loss for event in mine.validations}
    for event in reversed(other.validations):
        tokens = event.step * other.tokens_per_step
        loss = validated.get(tokens)
        if loss is not None and event.loss is not None:
            return loss, event.loss, f"validation loss after {tokens:,.0f} tokens"
    tokens = min(mine.steps[-1].tokens, other.steps[-1].tokens)
    width = smoothing_width(min(len(mine.steps), len(other.steps)))
    means = [_mean_before(summary, tokens, width) for summary in (mine, other)]
    return means[0], means[1], f"training loss, mean of {width} steps up to {tokens:,} tokens"


def describe_cost(mine: Summary, other: Summary) -> str:
    """Difference in loss between two runs, as text."""
    here, there, what = loss_difference(mine, other)
    return f"{what}: {here:.4f} against {there:.4f}, {here - there:+.4f} ({here / there - 1:+.2%})"


def _mean_before(summary: Summary, tokens: int, width: int) -> float:
    losses = [step.loss for step in summary.steps if step.tokens <= tokens] or [summary.steps[0].loss]
    return sum(losses[-width:]) / len(losses[-width:])


def comparison_figure(runs: Mapping[str, Summary]) -> "Figure":
    """Loss over time and throughput of all runs. Raises UserError for more runs than there are colours."""
    plt = pyplot()
    if len(runs) > len(RUN_COLOURS):
        raise UserError(f"{len(runs)} runs are too many for one figure: name at most {len(RUN_COLOURS)}")
    with plt.rc_context({"font.size": 9, "axes.labelcolor": INK, "text.color": INK}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.2, 4.6), layout="constrained")
        losses, speeds = figure.subplots(2, 1, gridspec_kw={"height_ratios": [3, 0.5 + 0.3 * len(runs)]})
    width = smoothing_width(min(len(summary.steps) for summary in runs.values()))
    for colour, (name, summary) in zip(RUN_COLOURS, runs.items(), strict=False):
        seconds = list(accumulate(step.seconds for step in summary.steps))
        centres, means = smoothed(seconds, [step.loss for step in summary.steps], width)
        shown = decimation(len(means))
        losses.plot(centres[shown], means[shown], color=colour, linewidth=1.8, label=name)
    names = list(runs)
    values = [runs[name].tokens_per_second for name in names]
    bars = speeds.barh(names, values, color=RUN_COLOURS[: len(names)], height=0.62)
    speeds.bar_label(bars, fmt="{:,.0f}", padding=3, color=INK)
    for axes in (losses, speeds):
        style_axes(axes)
    losses.set(xlabel="seconds", ylabel="training loss, nats per token")
    losses.set_title(f"loss over time, mean of {width} steps around each", fontsize=9.5, color=INK)
    losses.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    speeds.set_title("tokens per second, median step", fontsize=9.5, color=INK)
    speeds.set(xticks=[], xlim=(0, 1.18 * max(values)))
    speeds.spines["bottom"].set_visible(False)
    speeds.spines["left"].set_color(GREY)
    speeds.grid(visible=False)
    speeds.invert_yaxis()
    return figure
