"""What each boundary method costs in loss: the same model, data, optimiser and tokens, one method after the other.

    thinpipe tokenize --sources BOOKS... --validation-sources BOOKS --vocab-size 4096 --output TOKENS
    python -m benchmarks.convergence list
    python -m benchmarks.convergence run --data TOKENS
    python -m benchmarks.convergence report
    python -m benchmarks.convergence clock --data TOKENS

Every run is `thinpipe train` in one process (the twin, which sends itself the same messages) at one thread, two side by
side. Stop it at any time and start it again: runs go on where they were, and finished ones are not repeated. The
results folder keeps one small file for each finished run; `report` draws from these alone.
"""

import sys
from pathlib import Path

from benchmarks.convergence.command import study_options
from benchmarks.convergence.execute import execute, is_done
from benchmarks.convergence.runs import all_runs, at_the_edge, best_rates, core_hours, learning_rates


def print_list(output: Path) -> None:
    runs = all_runs(output)
    print("| priority | question | run | lr | seed | bytes/token | M tokens | core-hours | |")
    print("|---:|---|---|---:|---:|---:|---:|---:|---|")
    for study in runs:
        state = "done" if is_done(study, output) else "open"
        print(
            f"| {study.priority} | {study.question} | {study.name} | {study.lr:g} | {study.seed} | "
            f"{study.nbytes_per_token:.0f} | {study.tokens / 1e6:.2f} | {core_hours(study):.2f} | {state} |"
        )
    left = sum(core_hours(study) for study in runs if not is_done(study, output))
    print(f"\n{len(runs)} runs, {sum(map(core_hours, runs)):.1f} core-hours in all, {left:.1f} still open")
    for kind in at_the_edge(best_rates(output)):
        print(f"the best learning rate so far of {kind} is at the edge of those tried")


def main() -> int:
    whats = ("list", "run", "report", "clock")
    options = study_options(__doc__, "convergence", whats=whats, without_data=("list", "report"))
    if options.what == "list":
        print_list(options.output)
        return 0
    if options.what == "report":
        from benchmarks.convergence.report import report

        report(options.output)
        return 0
    if options.what == "clock":
        from benchmarks.convergence.clock import measure

        measure(options.data, options.output, all_runs(options.output))
        return 0
    common = {"work": options.work, "output": options.output, "side_by_side": options.side_by_side}
    failed = execute(learning_rates(), options.data, **common)  # which the others need
    wanted = [study for study in all_runs(options.output) if not options.only or study.question in options.only]
    failed += execute(wanted, options.data, **common)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
