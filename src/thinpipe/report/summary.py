"""Reads the event log of a run into the numbers that people ask for. Draws nothing."""

from dataclasses import dataclass
from pathlib import Path
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

    def lines(self) -> list[str]:
        if not self.steps:
            return ["no step has been finished yet"]
        last = self.steps[-1]
        seconds = sum(step.seconds for step in self.steps)
        lines = [
            f"{last.step:,} steps, {last.tokens:,} tokens in {seconds / 60:.1f} min of computing "
            f"({last.tokens / seconds:,.0f} tokens/s), {len(self.starts)} start(s)",
            f"training loss {self.steps[0].loss:.4f} -> {last.loss:.4f}",
        ]
        if self.validations:
            best_loss, step = min((event.loss, event.step) for event in self.validations if event.loss is not None)
            lines.append(f"best validation loss {best_loss:.4f} at step {step}")
        if self.skipped:
            lines.append(f"{len(self.skipped)} step(s) skipped because something was not finite")
        return lines


def summarise(run: Path) -> Summary:
    path = run / "events.jsonl"
    if not path.is_file():
        raise UserError(f"{path} does not exist: name the dump_folder of a run")
    events = list(read_events(path))
    return Summary(
        steps=_last_of_each_step([event for event in events if isinstance(event, Step)]),
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
