"""Event log of a run: a JSON-lines file that console, plots, reports and tests all read.

The structs below are its schema. Each line is written with a single unbuffered write; readers skip a line that a crash
has truncated.
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
    """Wall-clock time of the event, in seconds since 1970. Not for durations, which have fields of their own, measured
    with a monotonic clock."""


class Started(Event, frozen=True, kw_only=True, tag="started"):
    """The run started, or was resumed."""

    step: int
    config: str
    """Resolved settings of the run, as TOML."""
    parameters: int
    """Number of trainable parameters."""
    versions: dict[str, str]
    resumed_from: str | None = None
    changed: list[str] = []
    """Settings that differ from those of the checkpoint resumed from."""
    dim: int = 0
    """Width of the model's residual stream; 0 in logs of versions that did not record it."""
    segments: list[list[int]] = []
    """Segment indices of each process."""
    device_classes: list[str] = []
    """Class of each process's device (`device.device_class`); empty in logs of versions that did not record it."""
    precisions: list[str] = []
    """Precision recipe of each process, and for training.precision = "auto" why; empty in older logs."""


class LinkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Traffic of one step over one boundary between two processes, in one direction."""

    boundary: int
    forward: bool
    """True: states, sent forward. False: gradients, sent backward."""
    nbytes: int
    """Payload bytes, counted by the receiver."""
    waited_s: float
    """Seconds that the receiver was idle waiting for these messages."""
    mbps: float
    """Megabits per second, averaged over the longest pipeline run of any process in the step."""


class Step(Event, frozen=True, kw_only=True, tag="step"):
    """One optimiser step. `step` counts finished steps from 1."""

    step: int
    loss: float
    """Mean loss per token in nats, before the optimiser update."""
    grad_norm: float
    """Global gradient norm before clipping."""
    lr: float
    tokens: int
    """Tokens trained on since the run started."""
    seconds: float
    tokens_per_second: float
    links: list[LinkTraffic] = []
    """Traffic between processes; empty for a single process."""
    busy: list[float] = []
    """Fraction of its own pipeline run that each process spent computing."""
    memory: list[int] = []
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

    step: int
    culprit: str
    """First invalid quantity: "state over boundary 0", "gradient over boundary 0", "loss", or the first parameter in
    layer order with an invalid gradient."""
    sender: str
    """Process whose input was valid and whose output was not: "process 1", or the name of a peer."""
    boundary: int | None
    """Boundary over which the invalid value was sent; None if it was not sent."""
    forward: bool
    """Direction over the boundary: True for a state, False for a gradient."""
    reason: str
    """What is wrong with the culprit: "is not finite", "is absurdly large"."""


class Skipped(Event, frozen=True, kw_only=True, tag="skipped"):
    """A step that failed again when it was retried. It was skipped: no weight changed."""

    step: int
    loss: float | None
    """None if the loss was not finite, which JSON cannot express."""
    culprit: str
    """As in `Retried`."""
    sender: str = ""
    reason: str = "is not finite"


class Validated(Event, frozen=True, kw_only=True, tag="validated"):
    """The model was evaluated on the validation text."""

    step: int
    loss: float | None
    """Mean validation loss per token in nats; None if it was not finite."""
    bits_per_byte: float | None
    tokens: int
    """Tokens read."""
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
    """A checkpoint was written."""

    step: int
    path: str
    """Its folder."""
    nbytes: int
    seconds: float


class SaveFailed(Event, frozen=True, kw_only=True, tag="save_failed"):
    step: int
    reason: str


class Stopped(Event, frozen=True, kw_only=True, tag="stopped"):
    """The run stopped. `reason` is one of finished, signal, not_finite, not_saved."""

    step: int
    reason: str


class PeerAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Segments assigned to a peer, and the measured speed of its machine and of its link to the hub."""

    name: str
    segments: list[int]
    device: str = ""
    device_class: str = ""
    """What must be alike for equal bits (`device.device_class`); empty: the device does not repeat its own bits."""
    flops: float = 0.0
    """Measured floating-point operations per second."""
    memory_nbytes: int = 0
    """Memory of the peer that the run may use, in bytes."""
    up_bps: float = 0.0
    """Uplink rate in bits per second."""
    down_bps: float = 0.0
    """Downlink rate in bits per second."""
    latency_s: float = 0.0
    """Round-trip time to the hub in seconds."""


class GenerationStarted(Event, frozen=True, kw_only=True, tag="generation_started"):
    """A generation of a hub's run started: the set of peers that compute together until `GenerationEnded`. Peers that
    are not listed are standbys."""

    generation: int
    step: int
    """Step of the commit from which the generation continues."""
    peers: list[PeerAssignment]
    """Peers in pipeline order."""
    bottleneck: str = ""
    """Slowest part of the pipeline according to the measurements, in words."""


RUN_ENDING_CAUSES = ("finished", "not_finite", "stopped")
"""Causes of `GenerationEnded` after which the hub forms no further generation."""


class GenerationEnded(Event, frozen=True, kw_only=True, tag="generation_ended"):
    """A generation of a hub's run ended: its peers stop computing, and the hub forms the next generation."""

    generation: int
    step: int
    """Step from which the next generation is expected to continue: of the checkpoint that the peers are uploading, else
    of the newest commit. `GenerationStarted.step` is the step from which it does."""
    cause: str
    """A cause of `PeerLeft`, if a peer of the generation left; otherwise failed (a peer reported an error), deadlock,
    rebalance (standbys can take part), not_saved, not_finite, stopped (while the hub's owner stopped the run, whatever
    the reason) or finished. Cause accused is the word of a single peer, which `reason` names: the accused peer is
    removed only if enough peers agree, and then a `PeerLeft` with cause accused says so."""
    peer: str = ""
    """Peer that caused the end; empty if no single peer did."""
    reason: str
    """Cause in words, with the name of the peer."""

    @property
    def interrupts(self) -> bool:
        """False if the run ends with the generation: it is finished, has diverged or was stopped by the hub's owner."""
        return self.cause not in RUN_ENDING_CAUSES


class PeerJoined(Event, frozen=True, kw_only=True, tag="peer_joined"):
    """A peer joined or rejoined a hub's run."""

    step: int
    """Step of the newest commit."""
    peer: str


class PeerLeft(Event, frozen=True, kw_only=True, tag="peer_left"):
    """A peer left a hub's run, was lost, or was removed."""

    step: int
    """Step of the newest commit."""
    peer: str
    cause: str
    """One of left, restarted, disconnected, no_heartbeat, stalled, unresponsive (heartbeats arrive, but no request),
    refused (other settings or data), accused (by other peers, of sending bad values) and kicked (by the hub's
    owner)."""
    reason: str
    """Cause in words, with the name of the peer."""


class CheckpointDamaged(Event, frozen=True, kw_only=True, tag="checkpoint_damaged"):
    """Files of the hub's newest commit are missing or damaged, and the hub asks the peers for copies."""

    step: int
    """Step of the commit."""
    layers: list[str]
    """Layers whose files are missing or damaged."""
    reason: str
    """The layers and the peers that hold copies, in words."""


class CheckpointRepaired(Event, frozen=True, kw_only=True, tag="checkpoint_repaired"):
    """The hub has all files of its newest commit again."""

    step: int


class RolledBack(Event, frozen=True, kw_only=True, tag="rolled_back"):
    """No present peer has the missing files of the newest commit: the run continues from an older commit."""

    step: int
    """Step of the older commit."""
    lost_step: int
    """Step of the commit that was given up."""
    reason: str
    """The missing layers and the peers that hold copies, in words."""
    folder: str
    """Folder with the remaining files of the commit that was given up."""


class ExactnessLost(Event, frozen=True, kw_only=True, tag="exactness_lost"):
    """From this step on the numbers are no longer promised to be those of an undisturbed run; see `core.exactness`."""

    step: int
    reason: str


class LossRecomputed(Event, frozen=True, kw_only=True, tag="loss_recomputed"):
    """The hub has computed the loss of a step again, from its commit before that step."""

    step: int
    reported: float
    """The loss that was reported for this step."""
    recomputed: float
    band: float
    """Largest relative difference that devices and kernels explain."""
    peers: list[str]
    """Peers that could have falsified the loss: the one with the last segment computes it, the first one reports it."""
    seconds: float
    """Time that it took the hub."""

    @property
    def is_disputed(self) -> bool:
        return not abs(self.recomputed - self.reported) <= self.band * abs(self.recomputed)


TrainingEvent = Started | Step | Retried | Skipped | Validated | BasisChanged | Saved | SaveFailed | Stopped
"""Events that a training process writes, or sends to its hub."""
HubEvent = (
    GenerationStarted
    | GenerationEnded
    | PeerJoined
    | PeerLeft
    | CheckpointDamaged
    | CheckpointRepaired
    | RolledBack
    | ExactnessLost
    | LossRecomputed
)
"""Events that only a hub writes; the hub rejects them from peers."""
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
