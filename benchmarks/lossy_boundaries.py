"""One table for both tasks of arXiv 2401.07788: every claim, and what the images and the fine-tuning say of it.

    python -m benchmarks.lossy_boundaries --images benchmarks/results/images --finetune benchmarks/results/finetune \\
        --output benchmarks/results/second_paper.md

Reads what `benchmarks.images run` and `benchmarks.finetune run` left, finished or not: what has too few seeds is not
decided.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.finetune import results as finetune
from benchmarks.images.claims import Results as Images
from benchmarks.images.execute import read
from benchmarks.images.report import whole_seeds
from benchmarks.images.training import Recipe
from benchmarks.lossy_claims import HOW_TO_READ, decide
from benchmarks.verdicts import Claim


def of_images(output: Path) -> list[Claim]:
    results = Images.of(whole_seeds(read(output, Recipe())))
    return decide(results.evidence, results.judge)


def of_finetuning(output: Path) -> list[Claim]:
    records, pretraining = finetune.read_records(output)
    results = finetune.results_of(records, float(pretraining["before"]))
    return decide(results.evidence, results.judge)


def page(images: Sequence[Claim], finetuning: Sequence[Claim]) -> Iterator[str]:
    """Both studies are asked the same claims in the same order."""
    yield from (
        "# The claims of arXiv 2401.07788 on two tasks",
        "",
        "Made by `python -m benchmarks.lossy_boundaries`. ResNet: cut in four, digits. GPT-2: trained here, then "
        "fine-tuned on other books. Figures, bytes and all runs are on the pages of the two studies.",
        "",
        HOW_TO_READ,
        "",
        "| claim | what was compressed | ResNet | GPT-2 |",
        "|---|---|---|---|",
    )
    for first, second in zip(images, finetuning, strict=True):
        yield f"| {first.text} | {first.configuration} | {cell(first)} | {cell(second)} |"


def cell(claim: Claim) -> str:
    return f"**{claim.verdict}**<br>{claim.figures}"


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--finetune", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    text = "\n".join(page(of_images(options.images), of_finetuning(options.finetune))) + "\n"
    options.output.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
