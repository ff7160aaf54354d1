"""The keel against dense, token for token.

    python -m benchmarks.own list
    python -m benchmarks.own run --data TOKENS
    python -m benchmarks.own report

Runs are carried out, stopped and resumed as those of `benchmarks.convergence`.
"""

import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

from benchmarks.convergence.execute import execute, is_done
from benchmarks.convergence.study import trainable
from benchmarks.own.runs import DENSE, all_runs


def print_list(output: Path) -> None:
    print("| priority | run | seed | bytes/token | times fewer | trainable | M tokens | |")
    print("|---:|---|---:|---:|---:|---:|---:|---|")
    for study in all_runs():
        print(
            f"| {study.priority} | {study.name} | {study.seed} | {study.nbytes_per_token:.1f} | "
            f"{DENSE.nbytes_per_token / study.nbytes_per_token:.1f} | {trainable(study.model):,} | "
            f"{study.tokens / 1e6:.2f} | {'done' if is_done(study, output) else 'open'} |"
        )


def main() -> int:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "run", "report"))
    parser.add_argument("--data", type=Path, help="folder made by `thinpipe tokenize`")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/own"))
    parser.add_argument("--work", type=Path, default=Path("runs/own"), help="for runs under way")
    parser.add_argument("--only", nargs="*", help="questions")
    parser.add_argument("--side-by-side", type=int, default=2)
    options = parser.parse_args()
    if options.what == "list":
        print_list(options.output)
        return 0
    if options.what == "report":
        from benchmarks.own.report import report

        report(options.output)
        return 0
    if options.data is None:
        parser.error("run needs --data")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    wanted = [study for study in all_runs() if not options.only or study.question in options.only]
    failed = execute(wanted, options.data, work=options.work, output=options.output, side_by_side=options.side_by_side)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
