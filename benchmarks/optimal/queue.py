"""The queue: carries out the next unfinished run of a list, one after the other, until a number of hours is over.

Each run is `thinpipe train` at one thread. A run that is cut off, by the end of the hours, SIGTERM or a crash, is
resumed from its last checkpoint the next time.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.convergence.execute import Run, execute, is_done
from thinpipe.core.errors import UserError
from thinpipe.core.folder_lock import FolderLock

Runs = Callable[[], Sequence[Run]]
"""The list, which may depend on the records that there are."""


def next_unfinished(runs: Sequence[Run], output: Path) -> Run | None:
    return next((run for run in runs if not is_done(run, output)), None)


def work_off(
    runs: Runs,
    data: Path,
    work: Path,
    output: Path,
    *,
    hours: float,
    on_progress: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Carries out unfinished runs until `hours` are over or none is left; False if a run failed.

    `on_progress` is called at the start and after each run. `clock` returns seconds.
    """
    end = clock() + 3600 * hours

    def time_is_over() -> bool:
        return clock() >= end

    on_progress()
    while not time_is_over() and (run := next_unfinished(runs(), output)):
        if not _wait_for_orphan(work / run.key, time_is_over):
            break
        failed = execute([run], data, work, output, side_by_side=1, time_is_over=time_is_over)
        on_progress()
        if failed:
            return False
    return True


def _wait_for_orphan(folder: Path, time_is_over: Callable[[], bool]) -> bool:
    """Waits while a run whose queue was killed still computes in its folder; False if time is over first."""
    while folder.is_dir():
        try:
            FolderLock(folder, in_use_by="a run whose queue was killed").release()
            break
        except UserError as in_use:
            print(f"{in_use}: waiting for its end", flush=True)
        if time_is_over():
            return False
    return True
