"""Progress reporting of long data operations.

Functions take a `Progress`, by default `no_progress`, so that library code and tests print nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]
"""Reports progress: called with the number of bytes processed since the last call."""


class Progress(Protocol):
    """Starts the progress display of one operation. `total_nbytes` is None if the total is unknown."""

    def __call__(self, label: str, total_nbytes: int | None, /) -> AbstractContextManager[Advance]: ...


@contextmanager
def no_progress(_label: str, _total_nbytes: int | None) -> Iterator[Advance]:
    yield lambda _nbytes: None


@contextmanager
def progress_bar(label: str, total_nbytes: int | None) -> Iterator[Advance]:
    """Progress bar on stderr with speed and time left; silent if stderr is not a terminal."""
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(),
        rich_progress.DownloadColumn(),
        rich_progress.TransferSpeedColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("ETA"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task(label, total=total_nbytes)
        yield lambda nbytes: bars.advance(task, nbytes)
