"""What a person sees of a run: a progress bar with the time left on a terminal, plain lines anywhere else."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinpipe.core.event_words import describe
from thinpipe.core.events import AnyEvent, HubEvent, Started, Step


class Display(Protocol):
    """Shows events as they happen."""

    def show(self, event: AnyEvent) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lines:
    """For logs and pipes: torchtitan's kind of line, every `log_freq` steps."""

    def __init__(self, console: Console, *, log_freq: int) -> None:
        self.console, self.log_freq = console, log_freq

    def show(self, event: AnyEvent) -> None:
        if isinstance(event, HubEvent) or (isinstance(event, Step) and event.step % self.log_freq and event.step != 1):
            return  # of who comes and goes the hub speaks itself, with more words
        self.console.print(describe(event), highlight=False, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


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


def open_display(*, log_freq: int, total_steps: int) -> Display:
    console = Console()
    return Bar(console, total_steps=total_steps) if console.is_terminal else Lines(console, log_freq=log_freq)
