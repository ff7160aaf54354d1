"""The keel against dense, token for token.

    python -m benchmarks.own list
    python -m benchmarks.own run --data TOKENS
    python -m benchmarks.own report
    python -m benchmarks.own clock --data TOKENS

Runs are carried out, stopped and resumed as those of `benchmarks.convergence`.
"""

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.convergence.command import study_options
from benchmarks.convergence.execute import execute, is_done
from benchmarks.convergence.study import trainable
from benchmarks.own.runs import DENSE, RATES, all_runs, keel


def print_list(output: Path) -> None:
    print("| priority | run | seed | bytes/token | times fewer | trainable | M tokens | |")
    print("|---:|---|---:|---:|---:|---:|---:|---|")
    for study in all_runs():
        print(
            f"| {study.priority} | {study.name} | {study.seed} | {study.nbytes_per_token:.1f} | "
            f"{replace(DENSE, shape=study.shape).nbytes_per_token / study.nbytes_per_token:.1f} | "
            f"{trainable(study.model):,} | {study.tokens / 1e6:.2f} | {'done' if is_done(study, output) else 'open'} |"
        )


def main() -> int:
    options = study_options(__doc__, "own", whats=("list", "run", "report", "clock"), without_data=("list", "report"))
    if options.what == "list":
        print_list(options.output)
        return 0
    if options.what == "report":
        from benchmarks.own.report import report

        report(options.output)
        return 0
    if options.what == "clock":
        from benchmarks.convergence.clock import measure

        measure(options.data, options.output, (DENSE, keel(32), keel(16)), RATES, shown=1)
        return 0
    wanted = [study for study in all_runs() if not options.only or study.question in options.only]
    failed = execute(wanted, options.data, work=options.work, output=options.output, side_by_side=options.side_by_side)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
