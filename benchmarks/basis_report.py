"""The page and the picture of `benchmarks.basis`, from what it kept."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.basis_figure import draw
from benchmarks.basis_movement import random_distance, table

HOW_TO_READ = """\
Captured energy: the share of the last boundary's gradients that lies in span(U); best possible: that of the best
subspace of its width. Angle: mean principal angle of one update. Kept norm: ‖Z'‖/‖Z‖ of the weights that are carried
over. Loss added: what one change of basis costs at once, in nats. U: a word for its later half, where the distance of
bases n updates apart grows as n^p (1: straight on, 1/2: a random walk, 0: back and forth)."""


def write_report(result: Mapping[str, Any], output: Path) -> str:
    """OUTPUT.md, which is also given back, and OUTPUT.png."""
    text = page(result, output.name)
    output.with_suffix(".md").write_text(text)
    followed = any("movement" in found for found in result["summaries"].values())
    options = result["options"]
    random = random_distance(options["dim"], options["width"]) if followed else None
    draw(result["changes"], random, output.with_suffix(".png"))
    return text


def page(result: Mapping[str, Any], name: str) -> str:
    options = "; ".join(f"{setting} {value}" for setting, value in {**result["options"], **result["versions"]}.items())
    return "\n".join(
        (
            "# Where does the basis go?",
            "",
            "```",
            f"OMP_NUM_THREADS=1 python -m benchmarks.basis --data TOKENS --output benchmarks/results/{name}",
            "```",
            "",
            f"Every change of basis: [{name}.json]({name}.json). First quarter of a run → its last quarter:",
            "",
            *table(result["summaries"]),
            "",
            HOW_TO_READ,
            "",
            f"![where the basis goes]({name}.png)",
            "",
            options,
            "",
        )
    )
