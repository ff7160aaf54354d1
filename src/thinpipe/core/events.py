"""Event log of a run: a JSON-lines file that console, plots, reports and tests all read.

The structs below are its schema. Each line is written with a single unbuffered write; readers skip a line that a crash
has truncated.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import msgspec

from thinpipe.core.audit_events import BoundaryAlarm
from thinpipe.core.bounds import (
    MAX_REPLICAS,
    MAX_SEGMENTS,
    Count,
    LongText,
    Nbytes,
    Real,
    Seconds,
    SegmentIndex,
    ShortText,
    Text,
    Toml,
)
from thinpipe.core.event_base import Event
from thinpipe.core.hub_events import HubEvent

_MAX_PROCESSES = msgspec.Meta(max_length=4096)


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """The run started, or was resumed."""

    step: Count
    config: Toml
    """Resolved settings of the run, as TOML."""
    parameters: Count
    """Number of trainable parameters."""
    versions: Annotated[dict[Text, Text], msgspec.Meta(max_length=100)]
    resumed_from: LongText | None = None
    changed: Annotated[list[LongText], msgspec.Meta(max_length=1000)] = msgspec.field(default_factory=list)
    """Settings that differ from those of the checkpoint resumed from."""
    dim: Count = 0
    """Width of the model's residual stream; 0 in logs of versions that did not record it."""
    segments: Annotated[list[Annotated[list[SegmentIndex], msgspec.Meta(max_length=MAX_SEGMENTS)]], _MAX_PROCESSES] = (
        msgspec.field(default_factory=list)
    )
    """Segment indices of each process."""
    device_classes: Annotated[list[Text], _MAX_PROCESSES] = msgspec.field(default_factory=list)
    """Class of each process's device (`device.device_class`); empty in logs of versions that did not record it."""
    precisions: Annotated[list[Text], _MAX_PROCESSES] = msgspec.field(default_factory=list)
    """Precision recipe of each process, and for training.precision = "auto" why; empty in older logs."""


class LinkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one step over one boundary between two processes, in one direction."""

    boundary: SegmentIndex
    forward: bool
    """True: states, sent forward. False: gradients, sent backward."""
    nbytes: Nbytes
    """Payload bytes, counted by the receiver; of the last boundary's states with the labels that come beside them."""
    waited_s: Seconds
    """Seconds that the receiver was idle waiting for these messages."""
    mbps: Real
    """Megabits per second, averaged over the longest pipeline run of any process in the step."""


class Step(Event, frozen=True, kw_only=True, tag="step"):
    """One optimiser step. `step` counts finished steps from 1."""

    step: Count
    loss: Real
    """Mean loss per token in nats, before the optimiser update."""
    grad_norm: Real
    """Global gradient norm before clipping."""
    lr: Real
    tokens: Count
    """Tokens trained on since the run started."""
    seconds: Seconds
    tokens_per_second: Real
    links: Annotated[list[LinkTraffic], msgspec.Meta(max_length=2 * MAX_SEGMENTS)] = msgspec.field(default_factory=list)
    """Traffic between processes; empty for a single process."""
    busy: Annotated[list[Real], _MAX_PROCESSES] = msgspec.field(default_factory=list)
    """Fraction of its own pipeline run that each process spent computing."""
    memory: Annotated[list[Nbytes], _MAX_PROCESSES] = msgspec.field(default_factory=list)
    """Peak memory of each process in bytes: resident set, or GPU allocation."""

    @property
    def bubble(self) -> float | None:
        """Pipeline bubble: mean fraction of the step that the processes spent waiting."""
        return 1 - sum(self.busy) / len(self.busy) if self.busy else None

    @property
    def slowest(self) -> int | None:
        """Rank of the process that computed for the largest fraction of the step."""
        return self.busy.index(max(self.busy)) if self.busy else None


class Retried(Event, frozen=True, kw_only=True, tag="retried"):
    """A step failed and is computed again, from the same weights and on the same data. The failed attempt changed
    nothing."""

    step: Count
    culprit: Text
    """First invalid quantity: "state over boundary 0", "gradient over boundary 0", "loss", or the first parameter in
    layer order with an invalid gradient."""
    sender: Text
    """Process whose input was valid and whose output was not: "process 1", or the name of a peer."""
    boundary: SegmentIndex | None
    """Boundary over which the invalid value was sent; None if it was not sent."""
    forward: bool
    """Direction over the boundary: True for a state, False for a gradient."""
    reason: LongText
    """What is wrong with the culprit: "is not finite", "is absurdly large"."""


class Skipped(Event, frozen=True, kw_only=True, tag="skipped"):
    """A step that failed again when it was retried. It was skipped: no weight changed."""

    step: Count
    loss: Real | None
    """None if the loss was not finite, which JSON cannot express."""
    culprit: Text
    """As in `Retried`."""
    sender: Text = ""
    reason: LongText = "is not finite"


class SourceLoss(msgspec.Struct, frozen=True, kw_only=True):
    """Validation loss on the text of one source of a mixture."""

    name: ShortText
    loss: Real | None
    """As in `Validated`."""
    bits_per_byte: Real | None
    tokens: Count


class Validated(Event, frozen=True, kw_only=True, tag="validated", omit_defaults=True):
    """The model was evaluated on the validation text."""

    step: Count
    loss: Real | None
    """Mean validation loss per token in nats; None if it was not finite. Of a mixture the mean by its weights."""
    bits_per_byte: Real | None
    tokens: Count
    """Tokens read."""
    seconds: Seconds
    sources: Annotated[list[SourceLoss], msgspec.Meta(max_length=10_000)] = msgspec.field(default_factory=list)
    """Of a mixture: the losses of its sources that have validation text."""


class BasisChanged(Event, frozen=True, kw_only=True, tag="basis_changed"):
    step: Count
    version: Count
    captured_energy: Real
    largest_angle: Real
    mean_angle: Real
    orthonormality_error: Real
    kept_norm: Real
    loss_before: Real | None
    loss_after: Real | None


class Merged(Event, frozen=True, kw_only=True, tag="merged"):
    """A round is over: the replicas have merged what their weights have changed by."""

    step: Count
    """Steps of the run that are merged by now."""
    round: Count
    """From 1."""
    steps: Annotated[list[Count], msgspec.Meta(max_length=MAX_REPLICAS)]
    """Steps of each replica in this round."""
    update_norm: Real
    """Norm of the merged update."""
    nbytes: Nbytes
    """Bytes of all contributions."""
    seconds: Seconds


class Saved(Event, frozen=True, kw_only=True, tag="saved"):
    """A checkpoint was written."""

    step: Count
    path: LongText
    """Its folder."""
    nbytes: Nbytes
    seconds: Seconds


class SaveFailed(Event, frozen=True, kw_only=True, tag="save_failed"):
    step: Count
    reason: LongText


class Stopped(Event, frozen=True, kw_only=True, tag="stopped"):
    """The run stopped. `reason` is one of finished, signal, not_finite, not_saved."""

    step: Count
    reason: LongText


TrainingEvent = (
    Started
    | Step
    | Retried
    | Skipped
    | Merged
    | Validated
    | BasisChanged
    | Saved
    | SaveFailed
    | Stopped
    | BoundaryAlarm
)
"""Events that a training process writes, or sends to its hub."""
AnyEvent = TrainingEvent | HubEvent

_DECODER = msgspec.json.Decoder(AnyEvent)


class EventLog:
    """Appends events to a log file. Existing lines stay; a truncated last line is terminated before the first write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._has_partial_line = self._file.tell() > 0 and not _ends_with_newline(path)

    def write(self, event: AnyEvent) -> None:
        """Appends one event. Raises OSError when the disk is full; the next event then starts on a new line."""
        self.write_line(msgspec.json.encode(event))

    def write_line(self, encoded: bytes) -> None:
        """Like `write`, for an event that is already encoded as JSON."""
        line = (b"\n" if self._has_partial_line else b"") + encoded + b"\n"
        self._has_partial_line = True
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._has_partial_line = False

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Events in the order of writing. Skips truncated and damaged lines; raises msgspec.ValidationError for a line of
    another schema."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield _DECODER.decode(line)
            except msgspec.ValidationError:
                raise  # complete JSON, but of another schema
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue


def read_events_of_any_version(path: Path) -> tuple[list[AnyEvent], int]:
    """Like `read_events`, for logs of any thinpipe version: the events of the current schema, and the number of lines
    of another schema."""
    events, unknown = list[AnyEvent](), 0
    with path.open("rb") as file:
        for line in file:
            try:
                events.append(_DECODER.decode(line))
            except msgspec.ValidationError:
                unknown += 1
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
    return events, unknown


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
