"""The command line of a benchmark, `python -m benchmarks.NAME`: settings from flags, errors as one line."""

import sys
from collections.abc import Callable
from typing import TypeVar

import tyro

from thinpipe.core.errors import UserError

Settings = TypeVar("Settings")


def run_benchmark(name: str, settings: type[Settings], run: Callable[[Settings], int | None]) -> int:
    """Parses the flags of this process into `settings` and runs; exit code 2 when what was asked for makes no sense."""
    try:
        return run(tyro.cli(settings, prog=f"python -m benchmarks.{name}")) or 0
    except UserError as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
