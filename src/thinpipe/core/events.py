"""What happened in a run, one JSON object a line: console, plots, reports and tests read the same file.

The schema is the structs below. A line is written whole and flushed; a reader skips a last line cut short by a crash.
"""

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    time_s: float = msgspec.field(default_factory=time.time)
    """Seconds since 1970, for people; durations are measured with a monotonic clock and have fields of their own."""


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """A process began or went on with the run."""

    step: int
    config: str
    """The resolved settings, as TOML."""
    parameters: int
    versions: dict[str, str]
    resumed_from: str | None = None
    changed: list[str] = []
    """Settings that differ from those of the checkpoint."""
    dim: int = 0
    """Numbers of a token in a dense model of this width; 0 in logs that do not say it."""
    segments: list[list[int]] = []
    """Those that each process computes."""


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """What crossed one boundary between two processes in one direction, in one step."""

    boundary: int
    forward: bool
    """States go forward, gradients back."""
    nbytes: int
    """Payload that the receiver counted."""
    waited_s: float
    """That the receiver had nothing to do but wait for it."""
    mbps: float
    """Averaged over the step."""


class Step(Event, frozen=True, kw_only=True, tag="step"):
    """One optimiser step. `step` counts finished steps from 1."""

    step: int
    loss: float
    """Mean over the tokens of the step, in nats, before the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    tokens: int
    """Seen since the run began."""
    seconds: float
    tokens_per_second: float
    links: list[LinkUse] = []
    """Between processes; empty for one."""
    busy: list[float] = []
    """The share of the step in which each process computed."""
    memory: list[int] = []
    """The most bytes that each process ever held: resident, or allocated on a GPU."""

    @property
    def bubble(self) -> float | None:
        """The share of the processes' time that went by in waiting."""
        return 1 - sum(self.busy) / len(self.busy) if self.busy else None

    @property
    def slowest(self) -> int | None:
        """The process for which the others wait."""
        return self.busy.index(max(self.busy)) if self.busy else None


class Retried(Event, frozen=True, kw_only=True, tag="retried"):
    """A step that went wrong and left no trace: it is computed again, from the same weights and on the same data."""

    step: int
    culprit: str
    """What was bad first: "state over boundary 0", "gradient over boundary 0", "loss", or the first parameter in layer
    order with a bad gradient."""
    sender: str
    """Who had good input and gave bad output: "process 1", or the name of a peer."""
    boundary: int | None
    """That it crossed, if it did."""
    forward: bool
    reason: str
    """What is said of the culprit: "is not finite", "is absurdly large"."""


class Skipped(Event, frozen=True, kw_only=True, tag="skipped"):
    """A step that went wrong again when it was retried: no weight changed."""

    step: int
    loss: float | None
    """None when the loss itself was not finite, which JSON cannot say."""
    culprit: str
    """As in `Retried`."""
    sender: str = ""
    reason: str = "is not finite"


class Validated(Event, frozen=True, kw_only=True, tag="validated"):
    step: int
    loss: float | None
    """None when it was not finite."""
    bits_per_byte: float | None
    tokens: int
    seconds: float


class BasisChanged(Event, frozen=True, kw_only=True, tag="basis_changed"):
    step: int
    version: int
    captured_energy: float
    largest_angle: float
    mean_angle: float
    orthonormality_error: float
    kept_norm: float
    loss_before: float | None
    loss_after: float | None


class Saved(Event, frozen=True, kw_only=True, tag="saved"):
    step: int
    path: str
    nbytes: int
    seconds: float


class SaveFailed(Event, frozen=True, kw_only=True, tag="save_failed"):
    step: int
    reason: str


class Stopped(Event, frozen=True, kw_only=True, tag="stopped"):
    """`reason`: finished, signal, not_finite, not_saved."""

    step: int
    reason: str


class PeerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer computes, and what was measured of its machine and of its line to the hub."""

    name: str
    segments: list[int]
    device: str = ""
    flops: float = 0.0
    memory_nbytes: int = 0
    """That the run may use there."""
    up_bps: float = 0.0
    down_bps: float = 0.0
    latency_s: float = 0.0
    """There and back."""


class Assembled(Event, frozen=True, kw_only=True, tag="assembled"):
    """An epoch of a hub's run begins: these peers compute, in the order of their segments; others are spares."""

    epoch: int
    step: int
    """Of the commit from which it goes on."""
    peers: list[PeerPlace]


class Arrived(Event, frozen=True, kw_only=True, tag="arrived"):
    """A peer joined a hub's run, or came back."""

    step: int
    """Of the newest commit."""
    peer: str


class Departed(Event, frozen=True, kw_only=True, tag="departed"):
    """A peer left a hub's run, was lost or removed."""

    step: int
    """Of the newest commit."""
    epoch: int
    """That it ended, or 0 when nobody waited for it."""
    peer: str
    reason: str
    """In words, with its name."""


TrainingEvent = Started | Step | Retried | Skipped | Validated | BasisChanged | Saved | SaveFailed | Stopped
"""What those who compute may tell of a run."""
HubEvent = Assembled | Arrived | Departed
"""What its hub alone may tell."""
AnyEvent = TrainingEvent | HubEvent

_DECODER = msgspec.json.Decoder(AnyEvent)


class EventLog:
    """Appends to a file; an earlier run's lines stay, and a line that a crash cut short is closed first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._torn = self._file.tell() > 0 and not _ends_with_newline(path)

    def write(self, event: AnyEvent) -> None:
        """Raises OSError when there is no room; the next event then begins on a line of its own."""
        line = (b"\n" if self._torn else b"") + msgspec.json.encode(event) + b"\n"
        self._torn = True
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._torn = False

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> Iterator[AnyEvent]:
    """Events in the order of writing; lines that are not whole are passed over."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield _DECODER.decode(line)
            except msgspec.ValidationError:
                raise  # whole, but of another schema
            except msgspec.DecodeError:
                continue


def read_known_events(path: Path) -> tuple[list[AnyEvent], int]:
    """Like `read_events`, for logs of any version: the events that this one knows, and how many lines it does not."""
    events, unknown = list[AnyEvent](), 0
    with path.open("rb") as file:
        for line in file:
            try:
                events.append(_DECODER.decode(line))
            except msgspec.ValidationError:
                unknown += 1
            except msgspec.DecodeError:
                continue
    return events, unknown


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
