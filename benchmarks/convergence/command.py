"""The command line that studies share: what to do, the tokens, where records and unfinished runs are."""

import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path


def study_options(
    text: str | None,
    name: str,
    *,
    whats: tuple[str, ...],
    without_data: tuple[str, ...],
    only: str = "questions",
    hours: bool = False,
) -> Namespace:
    """`whats`: what there is to choose from; those in `without_data` need no tokens. SIGTERM becomes an exit.

    `hours`: a queue, which has --hours in place of a choice of runs.
    """
    parser = ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=whats)
    parser.add_argument("--data", type=Path, help="folder made by `thinpipe tokenize`")
    parser.add_argument("--output", type=Path, default=Path(f"benchmarks/results/{name}"))
    parser.add_argument("--work", type=Path, default=Path(f"runs/{name}"), help="for unfinished runs")
    if hours:
        parser.add_argument("--hours", type=float, default=1.0, help="after which the run is saved and stopped")
    else:
        parser.add_argument("--only", nargs="*", help=only)
        parser.add_argument("--side-by-side", type=int, default=2)
    options = parser.parse_args()
    if options.data is None and options.what not in without_data:
        parser.error(f"{options.what} needs --data")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return options
