"""One line on a terminal that says what a command does now, where it would be silent for seconds: loading torch, making
a model. It is erased when that is done; nothing is written to files and pipes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def status_line(text: str) -> Iterator[None]:
    """Shows the text on stderr, if that is a terminal, for the duration of the block."""
    terminal = sys.stderr if sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty() else None
    if terminal is not None:
        print(f"{text} ...", end="\r", file=terminal, flush=True)
    try:
        yield
    finally:
        if terminal is not None:
            print(" " * (len(text) + 4), end="\r", file=terminal, flush=True)
