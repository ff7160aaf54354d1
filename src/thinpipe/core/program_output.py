"""Output of long-running programs (hub and peer): a plain console for people, and a log file for diagnosis.

Modules log to `logging.getLogger(__name__)`: warnings for something that went wrong and was worked around, information
for dropped or repeated messages. Text from another machine must be sanitized and truncated before it is logged.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from rich.console import Console

_MAX_LOG_NBYTES, _N_OLD_LOGS = 1 << 20, 1
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def plain_console() -> Console:
    """A console without wrapping, highlighting or markup."""
    return Console(soft_wrap=True, highlight=False, markup=False)


class _QuietFileHandler(RotatingFileHandler):
    """Drops records that cannot be written: a full disk must not fill the console with tracebacks."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name of the standard library
        del record


@contextmanager
def log_to_file(path: Path) -> Iterator[None]:
    """Appends the log of thinpipe's modules to a file within the `with` block. The file and one older file take at most
    1 MiB each."""
    logger = logging.getLogger("thinpipe")
    handler = _QuietFileHandler(path, maxBytes=_MAX_LOG_NBYTES, backupCount=_N_OLD_LOGS, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter(_FORMAT))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.close()
