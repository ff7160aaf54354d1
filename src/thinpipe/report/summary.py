"""Reads the event log of a run into the numbers that people ask for. Draws nothing."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent, BasisChanged, Skipped, Started, Step, Validated, read_events

Kind = TypeVar("Kind", bound=AnyEvent)


@dataclass(frozen=True)
class Summary:
    """Of every step the last attempt counts: a resumed run repeats what came after its checkpoint."""

    steps: list[Step]
    validations: list[Validated]
    """Those with a finite loss."""
    basis_changes: list[BasisChanged]
    skipped: list[Skipped]
    starts: list[Started]

    @property
    def seconds(self) -> float:
        """Of computing, validation and saving aside."""
        return sum(step.seconds for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """The median step's: the first ones warm up."""
        return median(step.tokens_per_second for step in self.steps)

    @property
    def nbytes_per_token(self) -> float:
        """Payload over the busiest link between two processes, both directions; 0 for one process."""
        last = self.steps[-1]
        by_boundary: dict[int, int] = {}
        for link in last.links:
            by_boundary[link.boundary] = by_boundary.get(link.boundary, 0) + link.nbytes
        return max(by_boundary.values(), default=0) / (last.tokens / last.step)

    def lines(self) -> list[str]:
        last, seconds = self.steps[-1], self.seconds
        lines = [
            f"{last.step:,} steps, {last.tokens:,} tokens in {seconds / 60:.1f} min of computing "
            f"({last.tokens / seconds:,.0f} tokens/s), {len(self.starts)} start(s)",
            f"training loss {self.steps[0].loss:.4f} -> {last.loss:.4f}",
        ]
        if self.validations:
            best_loss, step = min((event.loss, event.step) for event in self.validations if event.loss is not None)
            lines.append(f"best validation loss {best_loss:.4f} at step {step}")
        if last.bubble is not None:
            bubble = median(step.bubble or 0.0 for step in self.steps)
            lines.append(
                f"{len(last.busy)} processes, bubble {bubble:.0%} of their time, "
                f"{self.nbytes_per_token:,.0f} bytes a token over the busiest link"
            )
        if self.skipped:
            lines.append(f"{len(self.skipped)} step(s) skipped because something was not finite")
        return lines


def summarise(run: Path) -> Summary:
    path = run / "events.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist: name the dump_folder of a run")
    events = list(read_events(path))
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
    )


def _last_of_each_step(events: list[Kind]) -> list[Kind]:
    by_step = {event.step: event for event in events}
    return [by_step[step] for step in sorted(by_step)]
