"""What a person sees of a run: a progress bar with the time left on a terminal, plain lines anywhere else;
or the whole pipeline, a page and other people's tools, where somebody asks for them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinpipe.core.event_words import describe
from thinpipe.core.events import AnyEvent, HubEvent, Started, Step
from thinpipe.live.serving import serving
from thinpipe.live.sinks import Sink, SinkSettings, open_sinks
from thinpipe.live.table import Table
from thinpipe.train.config import RunConfig


class Display(Protocol):
    """Shows events as they happen."""

    def show(self, event: AnyEvent) -> None: ...


class Lines:
    """For logs and pipes: torchtitan's kind of line, every `log_freq` steps."""

    def __init__(self, console: Console, *, log_freq: int) -> None:
        self.console, self.log_freq = console, log_freq

    def show(self, event: AnyEvent) -> None:
        if isinstance(event, HubEvent) or (isinstance(event, Step) and event.step % self.log_freq and event.step != 1):
            return  # of who comes and goes the hub speaks itself, with more words
        self.console.print(describe(event), highlight=False, soft_wrap=True, markup=False)


class Bar:
    """For a terminal: one bar that moves, with the events worth remembering above it."""

    def __init__(self, console: Console, *, total_steps: int) -> None:
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

    def show(self, event: AnyEvent) -> None:
        if isinstance(event, Step):
            text = f"loss {event.loss:.4f}  {event.tokens_per_second:,.0f} tokens/s"
            self.progress.update(self.task, completed=event.step, description=text)
        elif not isinstance(event, HubEvent):  # which the hub has said itself
            if isinstance(event, Started):
                self.progress.reset(self.task, completed=event.step)  # steps of an earlier start say nothing of speed
            self.progress.console.print(describe(event), highlight=False, markup=False)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()


class WithSinks:
    """A display, and whoever else is told. A sink that fails is told no more: that is no reason to stop computing."""

    def __init__(self, display: Display, sinks: Sequence[Sink], console: Console) -> None:
        self._display, self._sinks, self._console = display, list(sinks), console

    def show(self, event: AnyEvent) -> None:
        self._display.show(event)
        for sink in list(self._sinks):
            try:
                sink.tell(event)
            except Exception as error:  # of other people's code
                self._sinks.remove(sink)
                _complain(self._console, sink, "is told no more", error)


def _close(sink: Sink, console: Console) -> None:
    try:
        sink.close()
    except Exception as error:  # as above
        _complain(console, sink, "was not closed", error)


def _complain(console: Console, sink: Sink, what: str, error: Exception) -> None:
    text = f"{type(sink).__name__} {what}, the run goes on: {type(error).__name__}: {error}"
    console.print(text, highlight=False, soft_wrap=True, markup=False)


@contextmanager
def open_display(config: RunConfig, *, leads: bool = True) -> Iterator[Display]:
    """`leads`: pages and sinks are for one process of a run."""
    console, metrics, folder = Console(), config.metrics, config.job.dump_folder
    with ExitStack() as stack:
        sinks = list[Sink]()
        if leads:
            if metrics.dashboard is not None:
                address = stack.enter_context(serving(folder, port=metrics.dashboard))
                console.print(f"the page of this run is at {address}", highlight=False)
            asked = SinkSettings(
                folder=folder, prometheus=metrics.prometheus, tensorboard=metrics.tensorboard, wandb=metrics.wandb
            )
            for sink in open_sinks(asked):
                stack.callback(_close, sink, console)
                sinks.append(sink)
        if not console.is_terminal:
            yield WithSinks(Lines(console, log_freq=metrics.log_freq), sinks, console)
        elif metrics.live and leads:
            yield WithSinks(stack.enter_context(Table(console, folder)), sinks, console)
        else:
            yield WithSinks(stack.enter_context(Bar(console, total_steps=config.training.steps)), sinks, console)
