"""The one seam through which long work on data tells how far it is.

Functions take a `Progress` and are quiet unless they are given another one, so libraries and tests print nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]
"""Called with the number of bytes done since the last call."""


class Progress(Protocol):
    """Opens one piece of work; `total_nbytes` is None when nobody knows how much there is."""

    def __call__(self, label: str, total_nbytes: int | None, /) -> AbstractContextManager[Advance]: ...


@contextmanager
def quiet(_label: str, _total_nbytes: int | None) -> Iterator[Advance]:
    yield lambda _nbytes: None


@contextmanager
def progress_bar(label: str, total_nbytes: int | None) -> Iterator[Advance]:
    """A bar on stderr with speed and time left; nothing at all when stderr is not a terminal."""
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
