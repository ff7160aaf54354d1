"""Draws what a hub's link must carry, by the law that `benchmarks.hub_load` measured.

python -m benchmarks.hub_figure --output docs/hub_link.png
"""

from argparse import ArgumentParser
from pathlib import Path

from thinpipe.report.figures import COLOURS, pyplot

DIM, TOKENS_PER_SECOND = 4096, 1000
IDS_NBYTES = 3
"""Of a vocabulary of 128k."""
STAGES = range(2, 65)
LINES_MBPS = {"80 Mbps": 80, "1 Gbps": 1000, "10 Gbps": 10_000}


def hub_mbps(stages: int, numbers: int, *, nbytes: int = 2, tokens_per_second: float = TOKENS_PER_SECOND) -> float:
    """In one direction, payloads alone: states and gradients of `numbers` values, and the ids, over S-1 boundaries."""
    return (stages - 1) * (2 * numbers * nbytes + IDS_NBYTES) * tokens_per_second * 8 / 1e6


def draw(path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    kinds = {"dense bf16": DIM, "k = d/8 bf16": DIM // 8, "k = d/100 bf16": DIM // 100}
    for colour, (name, numbers) in zip(COLOURS, kinds.items(), strict=False):
        axes.plot(STAGES, [hub_mbps(stages, numbers) for stages in STAGES], color=colour, label=name)
    for name, mbps in LINES_MBPS.items():
        axes.axhline(mbps, color="#777777", linewidth=1, linestyle="--")
        axes.text(STAGES[-1], mbps * 1.08, name, ha="right", va="bottom", fontsize=9, color="#444444")
    axes.set(
        yscale="log",
        xlabel="stages of one pipeline",
        ylabel="hub's link, Mbps in each direction",
        title=f"Through the hub at {TOKENS_PER_SECOND:,} tokens/s, d = {DIM}",
        xlim=(2, 64),
    )
    axes.set_xticks([2, 8, 16, 32, 48, 64])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()
