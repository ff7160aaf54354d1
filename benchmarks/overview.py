"""Draws the README's figure: a model cut over four homes, and what the bytes of each method let a home link carry.

python -m benchmarks.overview --output docs/overview.png

Bytes are those that the boundary methods state. Speeds are arithmetic: the link alone, nothing measured.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from benchmarks.message_sizes import (
    BF16,
    DIM,
    INT4,
    ROTATED_INT4,
    TOKENS,
    VOCABULARY,
    int4_channels,
    nbytes_per_token,
)
from thinpipe.boundary.sizes import MessageSize
from thinpipe.report.figures import BLUE, GREEN, GREY, INK, ORANGE, pyplot

UPLOAD_MBPS = 20
SUBSPACE_WIDTH, KEEL_RATIO = 40, 32
HOMES = ("Anna", "Bert", "Carla", "Dora")
COLOURS = (GREY, ORANGE, GREEN, BLUE)


def methods() -> dict[str, float]:
    """Bytes per token of each method."""
    dense = _size(DIM)
    keel = int4_channels(dense, KEEL_RATIO)
    return {
        "all numbers, bf16": nbytes_per_token(BF16, dense),
        "all numbers, 4 bits": nbytes_per_token(ROTATED_INT4, dense),
        f"keel,\n{keel} of {DIM:,} numbers, 4 bits": nbytes_per_token(INT4, _size(keel)),
        f"subspace,\n{SUBSPACE_WIDTH} of {DIM:,} numbers, bf16": nbytes_per_token(BF16, _size(SUBSPACE_WIDTH)),
    }


def _size(width: int) -> MessageSize:
    return MessageSize(batch=1, tokens=TOKENS, width=width, vocab_size=VOCABULARY)


def tokens_per_second(nbytes: float) -> float:
    """What an upload carries: a machine in the middle sends states on and gradients back."""
    return UPLOAD_MBPS * 1e6 / 8 / nbytes


def draw(path: Path) -> None:
    plt = pyplot()
    figure = plt.figure(figsize=(9, 5.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.3))
    upper.suptitle("One model, cut over four homes: every token crosses every cut, there and back", fontsize=11)
    _draw_homes(upper.subplots())
    lower.suptitle(
        f"The most that an upload of {UPLOAD_MBPS} Mbps carries, for layers {DIM:,} numbers wide (as in 8B models)",
        fontsize=11,
    )
    _draw_bars(lower.subplots())
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_homes(axes: Any) -> None:
    axes.set(xlim=(0, 4), ylim=(-0.15, 1.3))
    axes.axis("off")
    for place, name in enumerate(HOMES):
        axes.text(place + 0.5, 1.08, f"{name}'s machine", ha="center", fontsize=10, color=INK)
        for layer in range(4):
            box = _box((place + 0.22, 0.08 + 0.23 * layer), 0.56, 0.17)
            axes.add_patch(box)
            number = 4 * place + layer + 1
            axes.text(place + 0.5, 0.165 + 0.23 * layer, f"layer {number}", ha="center", va="center", fontsize=8)
        if place < len(HOMES) - 1:
            for height, text, ends in ((0.68, "states", (0.8, 1.2)), (0.3, "gradients", (1.2, 0.8))):
                start, end = (place + x for x in ends)
                arrow = {"arrowstyle": "-|>", "color": BLUE, "linewidth": 1.6}
                axes.annotate("", xy=(end, height), xytext=(start, height), arrowprops=arrow)
                axes.text(place + 1, height + 0.05, text, ha="center", fontsize=7, color=BLUE)


def _box(corner: tuple[float, float], width: float, height: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(corner, width, height, boxstyle="round,pad=0.01", facecolor="#eef3f8", edgecolor=GREY)


def _draw_bars(axes: Any) -> None:
    found = methods()
    speeds = [tokens_per_second(nbytes) for nbytes in found.values()]
    axes.barh(list(found), speeds, color=COLOURS, height=0.62)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.65 * max(speeds))
    for row, (nbytes, speed) in enumerate(zip(found.values(), speeds, strict=True)):
        text = f"  {speed:,.0f} tokens/s   ({nbytes:,.0f} bytes a token)"
        axes.text(speed, row, text, va="center", fontsize=9.5, color=INK)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
