"""The loss over tokens as a picture (needs the extra `report`)."""

from pathlib import Path
from typing import Any

from thinpipe.core.extras import need
from thinpipe.report.summary import Summary


def pyplot() -> Any:
    """matplotlib's, for files."""
    need("matplotlib", extra="report", what="a figure")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def draw_loss(summary: Summary, path: Path, title: str) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens = [step.tokens / 1e6 for step in summary.steps]
    axes.plot(tokens, [step.loss for step in summary.steps], color="#9ecae1", linewidth=1, label="training, each step")
    smooth = smoothed([step.loss for step in summary.steps])
    axes.plot(tokens, smooth, color="#08519c", label="training, smoothed")
    if summary.validations:
        per_step = summary.steps[-1].tokens / summary.steps[-1].step / 1e6
        places = [event.step * per_step for event in summary.validations]
        axes.plot(
            places, [event.loss or 0.0 for event in summary.validations], "o-", color="#d95f02", label="validation"
        )
    axes.set(xlabel="tokens, millions", ylabel="loss, nats per token", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def smoothed(values: list[float], weight: float = 0.9) -> list[float]:
    """An exponential mean that does not start from zero."""
    smooth, total, norm = [], 0.0, 0.0
    for value in values:
        total = weight * total + value
        norm = weight * norm + 1
        smooth.append(total / norm)
    return smooth
