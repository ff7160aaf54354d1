"""Draws what happens when a peer is lost, as a schema without a scale: steps, a commit, the loss, the way back.

python -m benchmarks.fault_figure --output docs/concepts/fault_model.png
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from thinpipe.report.figures import COLOURS, pyplot

ROWS = {"hub": 2.0, "anna": 1.0, "bert": 0.0}
STEP, BEFORE_LOSS, AGAIN_AT = 1.0, 7, 11.0
COMMIT, SENT_AT, SENT_AGAIN_AT = 4, 6.6, 16.2
HEIGHT = 0.42


def draw(path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(10, 3.6), layout="constrained")
    _before_the_loss(axes)
    _after_it(axes)
    axes.set(xlim=(-0.2, 17.8), ylim=(-0.75, 2.6), xticks=[], yticks=list(ROWS.values()))
    axes.set_yticklabels(list(ROWS))
    axes.set_xlabel("time, not to scale")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _before_the_loss(axes: Any) -> None:
    for number in range(1, BEFORE_LOSS + 1):
        for peer in ("anna", "bert"):
            _box(axes, peer, (number - 1) * STEP, STEP, str(number), COLOURS[0], 0.9 if number <= COMMIT else 0.45)
    for peer in ("anna", "bert"):
        _arrow(axes, (COMMIT * STEP, ROWS[peer] + HEIGHT / 2), (SENT_AT, ROWS["hub"] - HEIGHT / 2))
    axes.text(3.3, 1.5, "state of step 4, within\na share of the uplink", ha="right", va="center", fontsize=8)
    _box(axes, "hub", 0.0, SENT_AT, "commit 0", "#777777", 0.7)
    axes.plot([BEFORE_LOSS], [ROWS["bert"]], marker="x", markersize=14, markeredgewidth=3, color="#bb2222")
    axes.text(BEFORE_LOSS + 0.25, ROWS["bert"], "killed", va="center", fontsize=9, color="#bb2222")


def _after_it(axes: Any) -> None:
    _box(axes, "hub", SENT_AT, SENT_AGAIN_AT - SENT_AT, "commit 4", "#777777", 0.9)
    axes.text(8.4, 1.5, "no heartbeat:\nthe generation is over", ha="left", va="center", fontsize=8)
    _arrow(axes, (8.2, ROWS["hub"] - HEIGHT / 2), (8.2, ROWS["anna"] + HEIGHT / 2))
    _box(axes, "anna", BEFORE_LOSS * STEP, 3.2, "next?  wait for bert", "#dddddd", 0.8, dark=True)
    _box(axes, "bert", 9.2, 1.0, "next?", "#dddddd", 0.8, dark=True)
    axes.text(10.2, 2.4, "is commit 4 whole? if not: give what you have of it", ha="center", va="center", fontsize=8)
    for peer in ("anna", "bert"):
        _box(axes, peer, 10.2, 0.8, "load 4", "#dddddd", 0.8, dark=True)
        for index, number in enumerate((5, 6, 7, 8, 9, 10)):
            _box(axes, peer, AGAIN_AT + index * STEP, STEP, str(number), COLOURS[0], 0.9)
    axes.text(12.5, -0.55, "the same data from the same weights: the same bits", ha="center", fontsize=9)
    axes.text(5.5, -0.55, "5 to 7 were computed and are lost", ha="center", fontsize=9)
    for peer in ("anna", "bert"):
        _arrow(axes, (AGAIN_AT + 4 * STEP, ROWS[peer] + HEIGHT / 2), (SENT_AGAIN_AT, ROWS["hub"] - HEIGHT / 2))
    _box(axes, "hub", SENT_AGAIN_AT, 1.4, "commit 8", "#777777", 0.9)


def _box(
    axes: Any, row: str, start: float, width: float, text: str, colour: str, strength: float, *, dark: bool = False
) -> None:
    axes.barh(ROWS[row], width, HEIGHT, left=start, color=colour, alpha=strength, edgecolor="white", linewidth=1.5)
    shade = "#222222" if dark else "white"
    axes.text(start + width / 2, ROWS[row], text, ha="center", va="center", fontsize=9, color=shade)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": "#444444", "linewidth": 1.2})


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
