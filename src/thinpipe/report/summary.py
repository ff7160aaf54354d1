"""Reads the event log of a run and derives its key figures. Draws nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TypeVar

from thinpipe.core.audit_events import AuditEvent, CommitMeasured, LossRecomputed
from thinpipe.core.errors import UserError
from thinpipe.core.events import (
    AnyEvent,
    BasisChanged,
    Retried,
    Saved,
    Skipped,
    Started,
    Step,
    Stopped,
    Validated,
    read_events_of_any_version,
)
from thinpipe.core.exactness import Exactness
from thinpipe.core.run_folder import events_path

Kind = TypeVar("Kind", Step, Validated, BasisChanged, Skipped, Saved)


@dataclass(frozen=True)
class Summary:
    """Events of a run by kind. Of a step that was computed several times (a resumed run repeats the steps after its
    checkpoint) the last attempt counts."""

    steps: list[Step]
    validations: list[Validated]
    """Validations with a finite loss."""
    basis_changes: list[BasisChanged]
    skipped: list[Skipped]
    starts: list[Started]
    saved: list[Saved] = field(default_factory=list)
    events: list[AnyEvent] = field(default_factory=list)
    """All events in log order, repeated steps included."""
    unknown: int = 0
    """Number of log lines that were skipped because another version of thinpipe wrote them."""

    @property
    def seconds(self) -> float:
        """Seconds spent in training steps, without validation and checkpoints."""
        return sum(step.seconds for step in self.steps)

    @property
    def overhead_seconds(self) -> float:
        """Seconds of validation and checkpoints, including those that peers of a hub save while they train."""
        return sum(event.seconds for event in self.validations) + sum(event.seconds for event in self.saved)

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the median step, which excludes warm-up."""
        return median(step.tokens_per_second for step in self.steps)

    @property
    def tokens_per_step(self) -> float:
        return self.steps[-1].tokens / self.steps[-1].step

    @property
    def nbytes_per_token(self) -> float:
        """Payload bytes per token at the busiest boundary in the last step, both directions; 0 for one process."""
        by_boundary: dict[int, int] = {}
        for link in self.steps[-1].links:
            by_boundary[link.boundary] = by_boundary.get(link.boundary, 0) + link.nbytes
        return max(by_boundary.values(), default=0) / self.tokens_per_step

    @property
    def ended(self) -> str | None:
        """Reason why the run stopped after its last start; None if it is running or was killed."""
        last = next((event for event in reversed(self.events) if isinstance(event, Started | Step | Stopped)), None)
        return last.reason if isinstance(last, Stopped) else None

    @property
    def exactness(self) -> str:
        """Whether the run is bit for bit that of an undisturbed one, in words; empty if the log does not tell."""
        found = Exactness()
        for event in self.events:
            found.on_event(event)
        return found.in_words()

    @property
    def recomputed(self) -> list[LossRecomputed]:
        return [event for event in self.events if isinstance(event, LossRecomputed)]

    @property
    def commit_losses(self) -> list[CommitMeasured]:
        return [event for event in self.events if isinstance(event, CommitMeasured)]

    @property
    def alarms(self) -> list[AuditEvent]:
        return [event for event in self.events if isinstance(event, AuditEvent) and event.is_disputed]

    @property
    def retried(self) -> list[Retried]:
        return [event for event in self.events if isinstance(event, Retried)]

    @property
    def repeated(self) -> list[Step]:
        """Earlier attempts of steps that were computed again because their results were lost."""
        counted = {id(step) for step in self.steps}
        return [event for event in self.events if isinstance(event, Step) and id(event) not in counted]

    def lines(self) -> list[str]:
        """Key figures as lines of text."""
        last, seconds = self.steps[-1], self.seconds
        lines = [
            f"{last.step:,} steps, {last.tokens:,} tokens in {seconds / 60:.1f} min of computing "
            f"({last.tokens / seconds:,.0f} tokens/s), {len(self.starts)} start(s)",
            f"training loss {self.steps[0].loss:.4f} -> {last.loss:.4f}",
        ]
        if self.validations:
            best_loss, step = best_validation(self.validations)
            lines.append(f"best validation loss {best_loss:.4f} at step {step}")
        if last.bubble is not None:
            bubble = median(step.bubble or 0.0 for step in self.steps)
            lines.append(
                f"{len(last.busy)} processes, bubble {bubble:.0%} of their time, "
                f"{self.nbytes_per_token:,.0f} bytes per token over the busiest link"
            )
        if self.skipped:
            lines.append(f"{len(self.skipped)} step(s) skipped because of bad values")
        return lines


def summarise(run: Path) -> Summary:
    """Reads events.jsonl of the run's folder. Raises UserError if there is none or no step has been finished."""
    path = events_path(run)
    if not path.is_file():
        raise UserError(f"{path} does not exist: name the dump_folder of a run")
    events, unknown = read_events_of_any_version(path)
    steps = _last_of_each_step([event for event in events if isinstance(event, Step)])
    if not steps:
        raise UserError(f"{run} has nothing to show yet: no step has been finished")
    return Summary(
        steps=steps,
        validations=_last_of_each_step(
            [event for event in events if isinstance(event, Validated) and event.loss is not None]
        ),
        basis_changes=_last_of_each_step([event for event in events if isinstance(event, BasisChanged)]),
        skipped=_last_of_each_step([event for event in events if isinstance(event, Skipped)]),
        starts=[event for event in events if isinstance(event, Started)],
        saved=_last_of_each_step([event for event in events if isinstance(event, Saved)]),
        events=events,
        unknown=unknown,
    )


def best_validation(validations: Sequence[Validated]) -> tuple[float, int]:
    """Lowest loss, and its step."""
    return min((event.loss, event.step) for event in validations if event.loss is not None)


def _last_of_each_step(events: list[Kind]) -> list[Kind]:
    by_step = {event.step: event for event in events}
    return [by_step[step] for step in sorted(by_step)]
