"""The table of claims and the table of all runs, from the records of finished runs alone."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.finetune.claims import ALMOST_NONE, BADLY, MARGIN, claims, spread
from benchmarks.finetune.figure import draw
from benchmarks.finetune.results import Results, read_records, results_of
from benchmarks.finetune.runs import (
    BOOKS,
    DIM,
    EPOCHS,
    LR,
    METHODS,
    SAMPLES,
    SEEDS,
    SEQ_LEN,
    VALIDATION_SAMPLES,
    Finetuning,
)


def report(output: Path) -> None:
    records, pretraining = read_records(output)
    results = results_of(records, float(pretraining["before"]))
    if not results.on("uncompressed"):
        print("the uncompressed run is not finished yet: the others have nothing to be compared with")
        return
    text = "\n".join([*head(results, records, pretraining), *claim_table(results), *run_table(results), *aqsgd(), ""])
    (output / "finetune.md").write_text(text)
    draw(results, output / "finetune.png")
    print(text)


def head(results: Results, records: Sequence[Mapping[str, Any]], pretraining: Mapping[str, Any]) -> Iterator[str]:
    whole = [kept for kept in records if kept["name"] in ("learning rate", "uncompressed") and kept["seed"] == SEEDS[0]]
    rates = {kept["lr"]: "diverged" if kept["on"] is None else f"{kept['on']:.4f}" for kept in whole}
    yield from (
        "# Compression while a GPT-2 is fine-tuned",
        "",
        "Made by `python -m benchmarks.finetune report`. The claims are those of arXiv 2401.07788, on a smaller model.",
        "",
        f"A dense GPT-2 (width {DIM}, 6 blocks, 3 boundaries, {pretraining['parameters'] / 1e6:.1f} M parameters) was "
        f"trained on {pretraining['tokens'] / 1e6:.1f} M tokens of books, then fine-tuned for {EPOCHS} epochs on "
        f"{SAMPLES * SEQ_LEN:,} tokens of {BOOKS} other books and measured on the {VALIDATION_SAMPLES * SEQ_LEN:,} "
        f"tokens that follow. Validation loss {results.before:.3f} before, {mean(results.best('uncompressed')):.3f} "
        f"after, without compression: a gain of {results.gain:.3f} nats. There is one pretrained model; seeds change "
        "the order of the data and the random rounding of gradients.",
        "",
        f"All have a learning rate of {LR:g}. Without compression, seed {SEEDS[0]}: "
        + ", ".join(f"{lr:.2g} gives {rates[lr]}" for lr in sorted(rates))
        + ".",
        "",
        "![validation losses](finetune.png)",
        "",
    )


def claim_table(results: Results) -> Iterator[str]:
    yield from (
        "## Claims",
        "",
        f"A difference counts when all {len(SEEDS)} seeds have its sign and their mean is beyond {MARGIN} nats. Badly: "
        f"more than {BADLY:.0%} of the gain is lost, with every seed. Almost nothing: at most {ALMOST_NONE:.0%} of it. "
        "Figures are nats above the uncompressed run unless they say otherwise, mean ± half the range over seeds; a "
        "run counts with the better of its two ways of inference, compression on or off.",
        "",
        "| claim | figures | verdict |",
        "|---|---|---|",
    )
    for claim in claims(results):
        yield f"| {claim.text} | {claim.figures} | **{claim.verdict}** |"
    yield ""


def run_table(results: Results) -> Iterator[str]:
    yield from (
        "## All runs",
        "",
        "Bytes a token at each boundary, as the method states them. *on*: validation sends what training sends; *off*: "
        "it sends whole states. What is lost is that of the better of the two.",
        "",
        "| run | seeds | bytes forward | back | fewer | loss, on | loss, off | off minus on | above uncompressed "
        "| share of gain lost |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    )
    whole = Finetuning(name="", boundary=METHODS["uncompressed"])
    full = whole.forward_nbytes + whole.backward_nbytes
    for name, boundary in METHODS.items():
        if not results.on(name):
            continue
        run = Finetuning(name=name, boundary=boundary)
        yield (
            f"| {name} | {len(results.on(name))} | {run.forward_nbytes:.1f} | {run.backward_nbytes:.1f} | "
            f"{full / (run.forward_nbytes + run.backward_nbytes):.1f}x | {loss(results.on(name))} | "
            f"{loss(results.off(name))} | {spread(results.off_minus_on(name))} | {spread(results.cost(name))} | "
            f"{spread(results.share_lost(name), '.0%')} |"
        )
    yield ""


def aqsgd() -> Iterator[str]:
    """Bytes alone: the runs are those in which the first visit crosses compressed."""
    yield from (
        "## What AQ-SGD sends",
        "",
        "Its paper sends the first epoch whole. Here the first visit of a sample crosses compressed as all others, so "
        "every epoch has the same bytes. Forward bytes a token, mean over the "
        f"{EPOCHS} epochs; whole states are bf16. Both ends of a boundary keep "
        f"{SAMPLES * SEQ_LEN * DIM * 4 / 1e6:.0f} MB.",
        "",
        "| run | as run | first epoch whole | fewer than uncompressed, as run | first epoch whole |",
        "|---|---:|---:|---:|---:|",
    )
    full = Finetuning(name="", boundary=METHODS["uncompressed"]).forward_nbytes
    for name, boundary in METHODS.items():
        if boundary.states.memory == "aqsgd":
            run = Finetuning(name=name, boundary=boundary)
            here, paper = run.forward_nbytes, run.paper_forward_nbytes
            yield f"| {name} | {here:.1f} | {paper:.1f} | {full / here:.1f}x | {full / paper:.1f}x |"


def loss(values: Sequence[float]) -> str:
    return spread(values, ".4f").removeprefix("+")
