"""The table of claims and the table of all runs, from nothing but the records of finished runs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

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
from benchmarks.lossy_claims import HOW_TO_READ, decide
from benchmarks.verdicts import NOT_FINITE, claim_table, spread
from thinpipe.core.errors import UserError


def report(output: Path) -> None:
    records, pretraining = read_records(output)
    results = results_of(records, float(pretraining["before"]))
    whole = results.measured("uncompressed").best
    if not whole or not all(map(math.isfinite, whole)):
        raise UserError("the uncompressed run is not finished or diverged: the others cannot be compared with it")
    text = "\n".join([*head(results, records, pretraining), *verdicts(results), *run_table(results), *aqsgd(), ""])
    (output / "finetune.md").write_text(text)
    draw(results, output / "finetune.png")
    print(text)


def head(results: Results, records: Sequence[Mapping[str, Any]], pretraining: Mapping[str, Any]) -> Iterator[str]:
    whole = [kept for kept in records if kept["name"] in ("learning rate", "uncompressed") and kept["seed"] == SEEDS[0]]
    rates = {kept["lr"]: NOT_FINITE if kept["on"] is None else f"{kept['on']:.4f}" for kept in whole}
    yield from (
        "# Compression while a GPT-2 is fine-tuned",
        "",
        "```",
        "thinpipe tokenize --sources BOOKS... --validation-sources OTHER_BOOKS --vocab-size 4096 --output TOKENS",
        "python -m benchmarks.finetune run --data TOKENS",
        "python -m benchmarks.finetune report",
        "```",
        "",
        "The claims are those of arXiv 2401.07788, on a smaller model. Settings and versions of every run: `records/`.",
        "",
        f"A dense GPT-2 (width {DIM}, 6 blocks, 3 boundaries, {pretraining['parameters'] / 1e6:.1f} M parameters) was "
        f"trained on {pretraining['tokens'] / 1e6:.1f} M tokens of books, then fine-tuned for {EPOCHS} epochs on "
        f"{SAMPLES * SEQ_LEN:,} tokens of {BOOKS} other books and measured on the {VALIDATION_SAMPLES * SEQ_LEN:,} "
        f"tokens that follow. Validation loss {results.before:.3f} before, {results.judge.uncompressed:.3f} "
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


def verdicts(results: Results) -> Iterator[str]:
    yield from ("## Claims", "", HOW_TO_READ, "", *claim_table(results.judge, partial(decide, results.evidence)), "")


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
        run, measured = Finetuning(name=name, boundary=boundary), results.measured(name)
        if measured.on:
            yield (
                f"| {name} | {len(measured.on)} | {run.forward_nbytes:.1f} | {run.backward_nbytes:.1f} | "
                f"{full / (run.forward_nbytes + run.backward_nbytes):.1f}x | {loss(measured.on)} | "
                f"{loss(measured.off)} | {spread(results.off_minus_on(name))} | {spread(results.cost(name))} | "
                f"{results.judge.show(measured.best)} |"
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
        if boundary.states.feedback == "aqsgd":
            run = Finetuning(name=name, boundary=boundary)
            here, paper = run.forward_nbytes, run.paper_forward_nbytes
            yield f"| {name} | {here:.1f} | {paper:.1f} | {full / here:.1f}x | {full / paper:.1f}x |"


def loss(values: Sequence[float]) -> str:
    return spread(values, ".4f").removeprefix("+")
