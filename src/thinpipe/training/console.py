"""Console output of a run: log lines, on a terminal above a progress bar with ETA. On request also a live table of the
pipeline, a web dashboard and exporters (Prometheus, TensorBoard, Weights & Biases)."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinpipe.config.run import RunConfig
from thinpipe.core.event_text import format_event_line
from thinpipe.core.events import AnyEvent, Started, Step
from thinpipe.core.hub_events import GenerationStarted, HubEvent
from thinpipe.monitor.exporters import Exporter, ExporterSettings, open_exporters
from thinpipe.monitor.terminal import LiveTable
from thinpipe.monitor.web_server import serving

_LOG = logging.getLogger(__name__)


class Display(Protocol):
    """Shows events as they happen."""

    def show(self, event: AnyEvent, text: str = "") -> None:
        """`text`: what to print of the event in place of its own text."""
        ...

    def say(self, text: str) -> None:
        """Prints a line."""
        ...

    def working(self, text: str) -> None:
        """Says what is done now, where nothing else would change for a while; until the next step has ended."""
        ...


class LineDisplay:
    """Display for logs and pipes: one line in the style of torchtitan every `log_freq` steps, and for other events."""

    def __init__(self, console: Console, *, log_freq: int) -> None:
        self.console, self.log_freq = console, log_freq
        self._names: list[str] = []
        """Names of the peers in pipeline order, in a hub's run."""

    def show(self, event: AnyEvent, text: str = "") -> None:
        if isinstance(event, GenerationStarted):
            self._names = [peer.name for peer in event.peers]
        if isinstance(event, HubEvent) or (isinstance(event, Step) and event.step % self.log_freq and event.step != 1):
            return  # the hub prints its own events, in more detail
        self.say(f"step: {event.step:>6}  {text}" if text else format_event_line(event, self._names))

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def working(self, text: str) -> None:
        """Nothing: a log has the line of what comes of it."""


class ProgressBarDisplay:
    """Display for a terminal: the lines of `LineDisplay` above a progress bar."""

    def __init__(self, console: Console, *, total_steps: int, log_freq: int) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
        )
        self.task = self.progress.add_task("starting", total=total_steps)
        self._lines = LineDisplay(self.progress.console, log_freq=log_freq)

    def show(self, event: AnyEvent, text: str = "") -> None:
        if isinstance(event, Step):
            speed = f"loss {event.loss:.4f}  {event.tokens_per_second:,.0f} tokens/s"
            self.progress.update(self.task, completed=event.step, description=speed)
        elif isinstance(event, Started):
            self.progress.reset(self.task, completed=event.step)  # exclude earlier steps from the ETA
        self._lines.show(event, text)

    def say(self, text: str) -> None:
        self._lines.say(text)

    def working(self, text: str) -> None:
        self.progress.update(self.task, description=text, refresh=True)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()


class DisplayWithExporters:
    """A display plus exporters. An exporter that raises is dropped with a warning; training continues."""

    def __init__(self, display: Display, exporters: Sequence[Exporter]) -> None:
        self._display, self._exporters = display, list(exporters)

    def show(self, event: AnyEvent, text: str = "") -> None:
        self._display.show(event, text)
        for exporter in list(self._exporters):
            try:
                exporter.on_event(event)
            except Exception:  # third-party code: any exception
                self._exporters.remove(exporter)
                _LOG.warning("%s failed and gets no more events; training continues", _name(exporter), exc_info=True)

    def say(self, text: str) -> None:
        self._display.say(text)

    def working(self, text: str) -> None:
        self._display.working(text)


def _close(exporter: Exporter) -> None:
    try:
        exporter.close()
    except Exception:  # third-party code: any exception
        _LOG.warning("%s could not be closed; its last metrics may be missing", _name(exporter), exc_info=True)


def _name(exporter: Exporter) -> str:
    return type(exporter).__name__


@contextmanager
def open_display(
    config: RunConfig, *, is_leader: bool = True, quiet: bool = False, console: Console | None = None
) -> Iterator[Display]:
    """Opens the display for these settings. Dashboard, exporters and live table are for one process of a run: the one
    with `is_leader`. `quiet`: nothing is printed. `console`: the one on which the program prints its other lines, which
    appear above the progress bar then; None: a new one."""
    console, metrics, folder = console or Console(quiet=quiet), config.metrics, config.job.dump_folder
    with ExitStack() as stack:
        exporters = list[Exporter]()
        if is_leader:
            if metrics.dashboard is not None:
                address = stack.enter_context(serving(folder, port=metrics.dashboard))
                console.print(f"the page of this run is at {address}", highlight=False)
            asked = ExporterSettings(
                folder=folder, prometheus=metrics.prometheus, tensorboard=metrics.tensorboard, wandb=metrics.wandb
            )
            for exporter in open_exporters(asked):
                stack.callback(_close, exporter)
                exporters.append(exporter)
        if quiet or not console.is_terminal:
            yield DisplayWithExporters(LineDisplay(console, log_freq=metrics.log_freq), exporters)
        elif metrics.live and is_leader:
            yield DisplayWithExporters(stack.enter_context(LiveTable(console, folder)), exporters)
        else:
            bar = ProgressBarDisplay(console, total_steps=config.training.steps, log_freq=metrics.log_freq)
            yield DisplayWithExporters(stack.enter_context(bar), exporters)
