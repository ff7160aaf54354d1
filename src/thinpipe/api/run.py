"""`train` runs training from Python; `Run` is what a run has left in its folder. No torch until it is needed."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from thinpipe.api.settings import run_settings
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, Started, Step, Stopped, Validated, read_events
from thinpipe.core.run_folder import events_path
from thinpipe.training.launch import train as train_with_observer
from thinpipe.training.observer import Observer


def train(
    config: RunConfig | Path | str,
    *,
    callbacks: Sequence[Callable[[AnyEvent], object]] = (),
    quiet: bool = False,
    **overrides: Any,
) -> "Run":
    """Trains, or resumes the run in the folder `job.dump_folder`, and returns the run when it has ended.

    `config`: settings, the path of a run file, or "preset:NAME". `overrides`: sections of the settings, each a
    dictionary of the keys to change (`train("run.toml", training={"steps": 100})`) or a settings object.

    With `parallelism.pipeline_parallel_degree` 1 the run is computed in this process; otherwise by processes that this
    one starts, or by those that `torchrun` has started. There each process calls `train`; a program that does so more
    than once opens a gloo process group itself, which all its runs use and leave open. A run does not use torch's
    global random number generators.

    In the main thread the first Ctrl+C or SIGTERM ends the run with a checkpoint (`stop_reason` "signal"). Then `train`
    raises KeyboardInterrupt after Ctrl+C, and after SIGTERM sends the signal again, to the handler that was there
    before, by default the end of the program. In other threads no signal is handled.

    `callbacks` are called with every event of the run (`Started`, `Step`, `Validated`, `Saved`, `Stopped` and others),
    in the thread of the caller, after the event was logged. A callback that raises ends the run with a checkpoint,
    before the next step (with several processes a few steps later), and the exception propagates.

    `quiet`: nothing is printed on stdout; with several processes their output is in `processes` of the run folder.
    Warnings go to the logger "thinpipe" of `logging`, by default to stderr.

    Raises UserError for wrong settings, RunFailedError if one of several processes failed. A run that diverged or could
    not save its last checkpoint raises nothing: see `Run.stop_reason`.
    """
    settings, observer = run_settings(config, overrides), Observer(callbacks, quiet=quiet)
    try:
        train_with_observer(settings, observer)
    finally:
        _deliver(observer.stop_signal)
    return Run(settings.job.dump_folder, observer.stop_reason)


def _deliver(number: signal.Signals | None) -> None:
    """Gives the program the signal that has ended a run, so that a loop over runs ends too."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    if number is not None:
        signal.raise_signal(number)


class Losses(NamedTuple):
    """A loss curve: `plt.plot(*run.losses())`."""

    steps: list[int]
    """Numbers of the steps, from 1, ascending."""
    losses: list[float]
    """Mean loss per token in nats."""


@dataclass(frozen=True)
class Run:
    """A run in its folder, finished or not."""

    folder: Path
    """Folder with event log, settings and checkpoints: `job.dump_folder`."""
    stop_reason: str | None = None
    """Why training ended: "finished", "signal" (Ctrl+C, SIGTERM, or a callback that raised), "not_finite" (diverged) or
    "not_saved" (the last checkpoint could not be written). None: the run goes on, or was killed."""

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """The run in a folder, also while another program trains it. Raises UserError if there is none."""
        run = cls(Path(folder))
        ends = [event for event in run.events() if isinstance(event, Started | Stopped)]
        return cls(run.folder, ends[-1].reason if ends and isinstance(ends[-1], Stopped) else None)

    def events(self) -> list[AnyEvent]:
        """All events of the run in the order of writing: `Started`, `Step`, `Validated`, `Saved`, `Stopped`, others."""
        path = events_path(self.folder)
        if not path.is_file():
            raise UserError(f"there is no run in {self.folder}: name the dump_folder of a run")
        return list(read_events(path))

    def losses(self) -> Losses:
        """Training loss of every step. Of a step that was computed again after a crash, the last loss."""
        found = {event.step: event.loss for event in self.events() if isinstance(event, Step)}
        return _curve(found)

    def validation_losses(self) -> Losses:
        """Validation losses, without those that were not finite."""
        events = [event for event in self.events() if isinstance(event, Validated)]
        return _curve({event.step: event.loss for event in events if event.loss is not None})

    def checkpoint(self) -> Path:
        """Folder of the newest whole checkpoint; `thinpipe.load` takes it. Raises UserError if there is none."""
        from thinpipe.checkpoint import find_checkpoint  # imports torch

        return find_checkpoint(self.folder).path

    def report(self, folder: Path | str | None = None) -> Path:
        """Writes report.html and report.md into a folder (`report` in the run folder by default); returns the path of
        report.html. Needs the extra `report`."""
        from thinpipe.api.report import make_report  # imports matplotlib

        return make_report(self.folder, output=None if folder is None else Path(folder)).page


def _curve(found: dict[int, float]) -> Losses:
    steps = sorted(found)
    return Losses(steps, [found[step] for step in steps])
