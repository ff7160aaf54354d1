"""Draws what `benchmarks.basis` found: one line for each run in every panel for which it has numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.basis_movement import LAGS, Change, by_lag
from thinpipe.report.figures import COLOURS, pyplot


def draw(series: Mapping[str, Sequence[Change]], random: float | None, path: Path) -> None:
    """`random`: the distance of random bases of those runs that know theirs; None if none does."""
    lines = list(zip(COLOURS[: len(series)], series.items(), strict=True))  # a run without a colour is an error
    plt = pyplot()
    figure, panels = plt.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
    energy, places, lags, costs, norms, errors = panels.flat
    for colour, (name, changes) in lines:
        numbers = range(1, len(changes) + 1)
        over_updates(energy, changes, "captured_energy", color=colour, label=name)
        over_updates(energy, changes, "best_energy", color=colour, linestyle=":")
        over_updates(places, changes, "to_first", color=colour, label=name)
        over_updates(norms, changes, "kept_norm", color=colour)
        over_updates(errors, changes, "gram_error", color=colour)
        if "apart" in changes[0]:
            apart = by_lag(changes)
            lags.plot(list(apart), list(apart.values()), "o-", color=colour, label=name)
        known = [(i, c) for i, c in zip(numbers, changes, strict=True) if c["loss_before"] and c["loss_after"]]
        costs.plot([i for i, _ in known], [c["loss_after"] - c["loss_before"] for _, c in known], color=colour)
    if random is not None:
        places.axhline(random, color="#444444", linewidth=1, linestyle="--", label="random bases")
    guide = [LAGS[0], LAGS[-1]]
    for power, style in ((1.0, "-."), (0.5, ":")):
        label = "straight on" if power == 1 else "random walk"
        lags.plot(guide, [0.01 * lag**power for lag in guide], style, color="#999999", linewidth=1, label=label)
    lags.set(xscale="log", yscale="log", xlabel="updates apart", ylabel="distance", title="Later half: does it go on?")
    lags.set_xticks(LAGS, [str(lag) for lag in LAGS])
    lags.minorticks_off()
    energy.set(ylabel="share", title="Energy in span(U); dotted: best possible", ylim=(0, 1))
    places.set(ylabel="distance", title="Distance to the first basis", ylim=(0, 1.05))
    costs.set(ylabel="nats", title="Loss added by the change")
    norms.set(ylabel="‖Z'‖ / ‖Z‖", title="Norm that the change keeps")
    errors.set(ylabel="largest |eigenvalue of UᵀU − 1|", title="Orthonormality", yscale="log", ylim=(1e-9, 1e-4))
    for axes in panels.flat:
        if axes is not lags:
            axes.set_xlabel("update")
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def over_updates(axes: Any, changes: Sequence[Change], key: str, **style: Any) -> None:
    """Nothing where a run did not keep it."""
    if all(key in change for change in changes):
        axes.plot(range(1, len(changes) + 1), [change[key] for change in changes], **style)
