"""What a thin boundary costs at 20 tokens per block weight: over widths and over boundaries.

    thinpipe tokenize --sources BOOKS... --validation-sources BOOKS --vocab-size 4096 --output TOKENS
    python -m benchmarks.optimal list
    python -m benchmarks.optimal next --hours 2 --data TOKENS
    python -m benchmarks.optimal report

PREREGISTRATION.md beside this file says what is run and what will count as an answer. `next` is for idle cores: it
carries out one unfinished run after the other at one thread and low priority, and stops when the hours are over, on
SIGTERM or on Ctrl+C. The run it works at is then saved, and goes on the next time with the same --work. The results
folder keeps a small file for each finished run, and `progress.md`. `report` needs these files alone.
"""

import os
import sys

from benchmarks.convergence.command import study_options
from benchmarks.optimal.books import refuse_other_data, split_books
from benchmarks.optimal.progress import progress_page, write_progress
from benchmarks.optimal.queue import work_off
from benchmarks.optimal.report import report
from benchmarks.optimal.runs import all_runs
from thinpipe.core.errors import UserError

NICENESS = 10


def main() -> int:
    options = study_options(
        __doc__, "optimal", whats=("list", "next", "report"), without_data=("list", "report"), hours=True
    )
    try:
        if options.what == "list":
            print(progress_page(all_runs(options.output), options.output))
            return 0
        if options.what == "report":
            report(options.output)
            return 0
        os.nice(NICENESS)
        refuse_other_data(options.data, options.output)
        books = options.work / "books"
        split_books(options.data, books)
        is_well = work_off(
            lambda: all_runs(options.output),
            books,
            options.work,
            options.output,
            hours=options.hours,
            on_progress=lambda: write_progress(all_runs(options.output), options.output),
        )
        return 0 if is_well else 1
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
