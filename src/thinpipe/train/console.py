"""What a person sees of a run: a progress bar with the time left on a terminal, plain lines anywhere else."""

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from thinpipe.core.events import (
    AnyEvent,
    BasisChanged,
    Retried,
    Saved,
    SaveFailed,
    Skipped,
    Started,
    Step,
    Stopped,
    Validated,
)


class Display(Protocol):
    """Shows events as they happen."""

    def show(self, event: AnyEvent) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_ADVICE = {
    "not_finite": " (three steps in a row). The last checkpoint is good, but repeats itself exactly: "
    "lower optimizer.lr or training.max_norm and run the same command",
    "not_saved": ". The last checkpoint is older than the run: make room and run the same command",
}


def describe(event: AnyEvent) -> str:
    """One line of text."""
    match event:
        case Started():
            origin = f"resumed from {event.resumed_from}" if event.resumed_from else "new run"
            changes = f"; changed: {', '.join(event.changed)}" if event.changed else ""
            return f"{origin}, {event.parameters:,} trainable parameters{changes}"
        case Step():
            return (
                f"step: {event.step:>6}  loss: {event.loss:7.4f}  grad_norm: {event.grad_norm:7.4f}  "
                f"lr: {event.lr:.2e}  tps: {event.tokens_per_second:,.0f}{_links(event)}"
            )
        case Retried():
            return f"step: {event.step:>6}  retried: {event.culprit} {event.reason}, from {event.sender}"
        case Skipped():
            sender = f", from {event.sender}" if event.sender else ""
            return f"step: {event.step:>6}  skipped: {event.culprit} {event.reason}{sender}; no weight changed"
        case Validated():
            if event.loss is None:
                return f"step: {event.step:>6}  validation loss is not finite"
            bits = f"  bits per byte: {event.bits_per_byte:.4f}" if event.bits_per_byte is not None else ""
            return f"step: {event.step:>6}  validation loss: {event.loss:7.4f}{bits}"
        case BasisChanged():
            return (
                f"step: {event.step:>6}  basis {event.version}: captured energy {event.captured_energy:.3f}, "
                f"largest angle {event.largest_angle:.3f}, loss {event.loss_before:.4f} -> {event.loss_after:.4f}"
            )
        case Saved():
            return f"step: {event.step:>6}  saved {event.path} ({event.nbytes / 1e6:.1f} MB, {event.seconds:.1f} s)"
        case SaveFailed():
            return f"step: {event.step:>6}  could not save: {event.reason}; older checkpoints stay"
        case Stopped():
            return f"step: {event.step:>6}  stopped: {event.reason}{_ADVICE.get(event.reason, '')}"


def _links(event: Step) -> str:
    """How the pipeline did: the share of time lost in waiting, for whom, and the busiest link."""
    if event.bubble is None or not event.links:
        return ""
    busiest = max(event.links, key=lambda link: link.mbps)
    total = sum(link.nbytes for link in event.links)
    return (
        f"  bubble: {event.bubble:.0%} (slowest: process {event.slowest})  "
        f"sent: {total / 1e6:.2f} MB  busiest link: {busiest.mbps:.1f} Mbps over boundary {busiest.boundary} "
        f"{'forward' if busiest.forward else 'back'}, waited {busiest.waited_s:.2f} s"
    )


class Lines:
    """For logs and pipes: torchtitan's kind of line, every `log_freq` steps."""

    def __init__(self, console: Console, *, log_freq: int) -> None:
        self.console, self.log_freq = console, log_freq

    def show(self, event: AnyEvent) -> None:
        if isinstance(event, Step) and event.step % self.log_freq and event.step != 1:
            return
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
        else:
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
