"""The command `thinpipe`: parses a verb's settings and calls the verb's function.

It holds no logic of any verb and imports no torch, and for the overview of verbs next to nothing. Exit code 2 is a user
error, reported as one message without a traceback. Warnings of thinpipe's loggers are shown as one line on stderr, here
for all commands and for the processes that they launch, which are commands too.
"""

import importlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import thinpipe
from thinpipe.cli.overview import overview
from thinpipe.core.errors import UserError
from thinpipe.core.extras import require_extra
from thinpipe.core.status_line import status_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (`sys.argv` by default) and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    replace_unknown_characters()
    if list(arguments) == ["--version"]:
        print(f"thinpipe {thinpipe.__version__}")
        return 0
    if list(arguments) in (["--help"], ["-h"], []):
        print(overview(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    show_warnings()
    try:
        from thinpipe.cli.parsing import parse  # tyro and the settings' classes take a tenth of a second

        verb, config = parse(arguments)
        if verb.swarm:
            require_extra("nats", extra="swarm", feature=f"thinpipe {arguments[0]}")
        if verb.reads_run:
            from thinpipe.core.run_folder import refuse_missing_run

            refuse_missing_run(config.run)
        if verb.check:
            _function(verb.check)(config)
        with status_line("loading"):
            function = _function(verb.target)
        code: int | None = function(config)
    except UserError as error:
        print(f"thinpipe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `thinpipe ... | head`; flushing stdout at exit must not raise it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code or 0


def _function(place: str) -> Callable[[Any], Any]:
    module, function = place.split(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(module), function)
    return found


def replace_unknown_characters() -> None:
    """Prints a question mark for a character that the encoding of stdout lacks, as cp1252 of a Windows pipe does."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


class _OneLine(logging.Handler):
    """Prints a record as one line on the stderr of the moment, which a progress bar may have redirected."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        text = record.getMessage() if error is None else f"{record.getMessage()}: {type(error).__name__}: {error}"
        with suppress(OSError, ValueError):  # stderr is broken or closed: the code that logs goes on
            print(f"thinpipe: {' '.join(text.split())}", file=sys.stderr, flush=True)


def show_warnings() -> None:
    """Shows the warnings of all thinpipe loggers on stderr; repeated calls change nothing."""
    logger = logging.getLogger("thinpipe")
    if not any(isinstance(handler, _OneLine) for handler in logger.handlers):
        logger.addHandler(_OneLine(logging.WARNING))
