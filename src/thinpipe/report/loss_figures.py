"""Figures of loss over tokens and of throughput over time."""

from itertools import accumulate
from typing import TYPE_CHECKING

from thinpipe.report.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    decimation,
    legend,
    new_figure,
    smoothed,
    smoothing_width,
    time_unit,
)
from thinpipe.report.summary import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def loss_figure(summary: Summary) -> "Figure":
    figure, axes = new_figure()
    tokens, losses = [step.tokens / 1e6 for step in summary.steps], [step.loss for step in summary.steps]
    width, shown = smoothing_width(len(losses)), decimation(len(losses))
    every = "each step" if shown.step == 1 else f"one of {shown.step} steps"
    axes.plot(tokens[shown], losses[shown], color=BLUE, alpha=0.55, linewidth=0.9, label=f"training, {every}")
    centres, means = smoothed(tokens, losses, width)
    label = f"training, mean of {width} steps around each"
    axes.plot(centres[shown], means[shown], color=BLUE, linewidth=1.8, label=label)
    if summary.validations:
        places = [event.step * summary.tokens_per_step / 1e6 for event in summary.validations]
        found = [event.loss for event in summary.validations]
        axes.plot(places, found, "o-", color=ORANGE, markersize=4, label="validation")
    _plot_audit(axes, summary)
    axes.set(xlabel="tokens, millions", ylabel="loss, nats per token")
    legend(axes)
    return figure


def _plot_audit(axes: "Axes", summary: Summary) -> None:
    """What the hub has computed by itself."""
    of_steps = [(event.step, event.recomputed) for event in summary.recomputed]
    of_commits = [(event.step, event.loss) for event in summary.commit_losses]
    for points, style, label in (
        (of_steps, ".", "recomputed by the hub"),
        (of_commits, "--", "commits, by the hub's own batch"),
    ):
        if points:
            places = [step * summary.tokens_per_step / 1e6 for step, _ in points]
            axes.plot(places, [loss for _, loss in points], style, color=GREEN, markersize=6, label=label)


def throughput_figure(summary: Summary) -> "Figure":
    """Throughput over the time spent in steps. Pauses between two starts are left out; restarts are marked."""
    figure, axes = new_figure(2.6)
    speeds = [step.tokens_per_second for step in summary.steps]
    clock = list(accumulate(step.seconds for step in summary.steps))
    unit, length = time_unit(clock[-1])
    places, width, shown = [at / length for at in clock], smoothing_width(len(speeds)), decimation(len(speeds))
    axes.plot(places[shown], speeds[shown], color=BLUE, alpha=0.55, linewidth=0.9, label="each step")
    centres, means = smoothed(places, speeds, width)
    label = f"mean of {width} steps around each"
    axes.plot(centres[shown], means[shown], color=BLUE, linewidth=1.8, label=label)
    for number, place in enumerate(_restarts(summary, places)):
        axes.axvline(place, color=GREY, linewidth=1, linestyle=":", label=None if number else "started again")
    axes.set(xlabel=f"{unit} of computing", ylabel="tokens per second")
    axes.set_ylim(0, 1.1 * max(speeds))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    legend(axes, loc="lower right")
    return figure


def _restarts(summary: Summary, places: list[float]) -> list[float]:
    """Positions on the time axis at which the run was started again."""
    by_step = {step.step: place for step, place in zip(summary.steps, places, strict=True)}
    return [by_step[start.step] for start in summary.starts[1:] if start.step in by_step]
