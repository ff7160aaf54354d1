"""Compression at the boundaries of a GPT-2 that is fine-tuned for four epochs: what holds of arXiv 2401.07788?

    thinpipe tokenize --sources BOOKS... --validation-sources OTHER_BOOKS --vocab-size 4096 --output TOKENS
    python -m benchmarks.finetune list
    python -m benchmarks.finetune run --data TOKENS
    python -m benchmarks.finetune report

Pretrains a small dense GPT-2 on the training books, then fine-tunes it on the first pages of two other books with one
boundary method after the other, and measures each on the pages that follow, with compression on and off at inference.
Every run is `thinpipe train` in one process at one thread, two side by side. Stop it at any time and start it again:
runs go on where they were, and finished ones are not repeated. `report` needs only the records of finished runs.
"""

import sys
from pathlib import Path

import torch

from benchmarks.convergence.command import study_options
from benchmarks.convergence.execute import execute, is_done, result_path
from benchmarks.finetune.books import cut_books
from benchmarks.finetune.record import has_pretrained, record, record_pretraining
from benchmarks.finetune.report import report
from benchmarks.finetune.runs import (
    BOOKS,
    BOOKS_FOLDER,
    RUNS,
    SAMPLES,
    SEQ_LEN,
    VALIDATION_SAMPLES,
    Finetuning,
    Pretraining,
    core_minutes,
)
from benchmarks.finetune.stamp import claim_folders, stamp_of
from thinpipe.core.errors import UserError


def print_list(output: Path) -> None:
    print("| run | lr | seed | bytes/token forward | back | |")
    print("|---|---:|---:|---:|---:|---|")
    for run in RUNS:
        state = "done" if is_done(run, output) else "open"
        print(
            f"| {run.name} | {run.lr:g} | {run.seed} | {run.forward_nbytes:.0f} | {run.backward_nbytes:.0f} | {state} |"
        )
    every: list[Pretraining | Finetuning] = [Pretraining(), *RUNS]
    left = sum(core_minutes(run) for run in every if not is_done(run, output))
    print(
        f"\n{len(RUNS)} runs and a pretraining, {sum(map(core_minutes, every)):.0f} core-minutes, {left:.0f} still open"
    )


def carry_out(data: Path, work: Path, output: Path, *, side_by_side: int, only: list[str] | None) -> bool:
    """Whether no run failed."""
    torch.set_num_threads(1)
    wanted = [run for run in RUNS if not only or run.name in only]
    claim_folders(work, output, stamp_of(data))
    books, pretraining = work / BOOKS_FOLDER, Pretraining()
    cut_books(data, books, books=BOOKS, seq_len=SEQ_LEN, samples=SAMPLES, validation_samples=VALIDATION_SAMPLES)
    if not has_pretrained(work, output):
        result_path(pretraining, output).unlink(missing_ok=True)  # a record without its weights is of no use here
        if execute([pretraining], data, work, output, side_by_side=1, record_of=record_pretraining):
            return False
    return not execute(wanted, books, work, output, side_by_side=side_by_side, record_of=record)


def main() -> int:
    options = study_options(
        __doc__, "finetune", whats=("list", "run", "report"), without_data=("list", "report"), only="names of runs"
    )
    try:
        if options.what == "list":
            print_list(options.output)
            return 0
        if options.what == "report":
            report(options.output)
            return 0
        whole = carry_out(
            options.data, options.work, options.output, side_by_side=options.side_by_side, only=options.only
        )
        return 0 if whole else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
