"""What boundaries cost while a trained model is tuned on another task: fp32, bf16, int8 and int4, rotated or not, and
the presets of `[boundary]` for published models.

    thinpipe tokenize --sources BOOKS... --validation-sources OTHER_BOOKS --vocab-size 4096 --output TOKENS
    python -m benchmarks.tuning_boundaries list
    python -m benchmarks.tuning_boundaries smoke --data TOKENS
    python -m benchmarks.tuning_boundaries run --data TOKENS --side-by-side 1
    python -m benchmarks.tuning_boundaries report

Trains a Llama of 11 M weights on books (about 37 minutes of one core), then tunes all of it on synthetic dialogues,
with one boundary after the other and three seeds: 29 tunings of about 5.5 minutes of one core. Together about 3.3
core-hours on a shared core that does 950 tokens a second; `list` says what is open. Every run is `thinpipe train` in
one process at one thread. Stop it at any time and start it again: runs go on where they were, and finished ones are not
repeated. `report` needs only the records of finished runs. `smoke` does the same in a minute with a tiny model, in the
work folder.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.convergence.command import study_options
from benchmarks.convergence.execute import execute, is_done, result_path
from benchmarks.tuning_boundaries.record import has_base, record, record_base, refuse_other_bases
from benchmarks.tuning_boundaries.report import report
from benchmarks.tuning_boundaries.runs import SEQ_LEN, SMOKE, TASK_FOLDER, Base, Tuning, core_minutes, runs, smoke_runs
from benchmarks.tuning_boundaries.task import make_task
from thinpipe.core.errors import UserError


def print_list(output: Path) -> None:
    print("| run | lr | seed | bytes/token forward | back | |")
    print("|---|---:|---:|---:|---:|---|")
    for run in runs():
        forward, backward = run.nbytes_per_token
        state = "done" if is_done(run, output) else "open"
        print(f"| {run.name} | {run.lr:.2g} | {run.seed} | {forward:.0f} | {backward:.0f} | {state} |")
    every: list[Base | Tuning] = [Base(), *runs()]
    left = sum(core_minutes(run) for run in every if not is_done(run, output))
    whole = sum(map(core_minutes, every))
    print(f"\nA base and {len(every) - 1} tunings, {whole:.0f} core-minutes, {left:.0f} still open")


def carry_out(
    base: Base, tunings: Sequence[Tuning], data: Path, work: Path, output: Path, *, side_by_side: int
) -> bool:
    """Whether no run failed."""
    torch.set_num_threads(1)
    task, sizes = work / TASK_FOLDER, base.sizes
    make_task(data, task, seq_len=SEQ_LEN, samples=sizes.samples, validation_samples=sizes.validation_samples)
    if not has_base(base, data, work, output):
        result_path(base, output).unlink(missing_ok=True)  # a record without its weights is of no use here
        if execute([base], data, work, output, side_by_side=1, record_of=record_base):
            return False
    refuse_other_bases(tunings, work, output)
    return not execute(tunings, task, work, output, side_by_side=side_by_side, record_of=record)


def main() -> int:
    options = study_options(
        __doc__,
        "tuning_boundaries",
        whats=("list", "smoke", "run", "report"),
        without_data=("list", "report"),
        only="names of runs",
    )
    work, output = options.work, options.output
    try:
        if options.what == "list":
            print_list(output)
            return 0
        if options.what == "report":
            report(output)
            return 0
        base, wanted = Base(), [run for run in runs() if not options.only or run.name in options.only]
        if options.what == "smoke":
            work = work / "smoke"
            base, wanted, output = Base(sizes=SMOKE), smoke_runs(), work / "results"
        return 0 if carry_out(base, wanted, options.data, work, output, side_by_side=options.side_by_side) else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
