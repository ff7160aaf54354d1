"""What "bit for bit" means in a run, and whether it holds: folded from the run's events. No torch here.

*Exact*: the numbers are those of the same run without any loss, restart or regrouping. That is promised while every
segment is computed by devices of one class only (`device.device_class`), and it is checked: steps that are computed
again must have the same loss and gradient norm. Which peer computes a segment, and how segments are grouped, does not
matter. If all segments have the same class, the numbers are also those of one process on such a device.

*Within a band*: the promise has ended, and steps computed again since then differed by no more than the band.

*Unknown*: the promise has ended, and no step was computed again, so nothing was measured.
"""

from collections.abc import Sequence
from math import inf, isfinite, isnan
from pathlib import Path

from thinpipe.core.events import AnyEvent, Started, Step, read_events_of_any_version
from thinpipe.core.hub_events import ExactnessLost, GenerationStarted

_MAX_STEPS = 10_000
"""Newest steps whose numbers are remembered for comparison; no run computes more of them again."""


class Exactness:
    """Pass every event of a run to `on_event`, in log order."""

    def __init__(self) -> None:
        self.classes: dict[int, str] = {}
        """Class of the devices that have computed a segment so far, by segment."""
        self.lost: ExactnessLost | None = None
        """When and why the promise ended; None: it holds."""
        self.repeated, self.band = 0, 0.0
        """`repeated`: steps computed again under the present promise. `band`: their largest relative difference in loss
        or gradient norm."""
        self._numbers: dict[int, tuple[float, float]] = {}
        """Loss and gradient norm of the newest steps, by step."""
        self._has_hub = False

    def on_event(self, event: AnyEvent) -> ExactnessLost | None:
        """Returns the end of the promise, if this event ends it."""
        before = self.lost
        match event:
            case GenerationStarted():
                self._has_hub = True
                names = [f"{peer.name} ({peer.device})" for peer in event.peers]
                classes = [peer.device_class for peer in event.peers]
                self._place(event.step, [peer.segments for peer in event.peers], classes, names)
            case Started():
                if event.changed:  # other settings give other numbers
                    self._numbers.clear()
                if not self._has_hub and event.device_classes:
                    names = [f"process {index}" for index in range(len(event.segments))]
                    self._place(event.step, event.segments, event.device_classes, names)
            case Step():
                self._compare(event)
            case ExactnessLost() if self.lost is None:  # by an earlier start of the hub
                self._end(event)
            case _:
                pass
        return self.lost if before is None else None

    def unlike(self, device_class: str) -> frozenset[int]:
        """Segments that have been computed by devices of another class."""
        return frozenset(segment for segment, known in self.classes.items() if known != device_class)

    def in_words(self) -> str:
        """Which promise held, in one line; empty before the first generation, and for logs of versions without
        classes."""
        if self.lost is None:
            again = f"; {self.repeated} step(s) computed again had the same loss and gradient norm"
            words = "exact: each segment was computed by devices of one class only"
            return (words + (again if self.repeated else "")) if self.classes else ""
        since = f"since step {self.lost.step} (before: exact)" if self.lost.step else "from the start"
        if self.repeated:
            measured = f"within {self.band:.1e} (loss and gradient norm of {self.repeated} step(s) computed again)"
            return f"{measured} {since}: {self.lost.reason}"
        return f"unknown {since}: {self.lost.reason}"

    def _place(self, step: int, places: Sequence[Sequence[int]], classes: Sequence[str], names: Sequence[str]) -> None:
        for segments, found, name in zip(places, classes, names, strict=False):
            for segment in segments:
                known = self.classes.setdefault(segment, found)
                if not found:
                    self._lose(step, f"{name} does not repeat its own bits: set debug.deterministic")
                elif known != found:
                    self._lose(step, f"segment {segment} moved to {name}, {found}, from {known or 'an unknown class'}")

    def _compare(self, event: Step) -> None:
        numbers = event.loss, event.grad_norm
        known = self._numbers.pop(event.step, None)
        self._numbers[event.step] = numbers
        if len(self._numbers) > _MAX_STEPS:
            del self._numbers[next(iter(self._numbers))]
        if known is None:
            return
        differences = [_difference(a, b) for a, b in zip(known, numbers, strict=True)]
        if any(differences):
            self._lose(event.step, "computed again on devices of the same classes, the step had another loss or norm")
        self.repeated, self.band = self.repeated + 1, max(self.band, *differences)

    def _lose(self, step: int, reason: str) -> None:
        if self.lost is None:
            self._end(ExactnessLost(step=step, reason=reason))

    def _end(self, event: ExactnessLost) -> None:
        self.lost, self.repeated, self.band = event, 0, 0.0


def exactness_of(log: Path) -> Exactness:
    """From the event log of a run; as new if there is none."""
    found = Exactness()
    for event in read_events_of_any_version(log)[0] if log.is_file() else ():
        found.on_event(event)
    return found


def _difference(a: float, b: float) -> float:
    """Relative difference: 0 for equal numbers, also if both are the same infinity or nan; else inf if one is not
    finite."""
    if a == b or (isnan(a) and isnan(b)):
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if isfinite(a) and isfinite(b) else inf
