"""Audit of reported losses: the hub computes losses from its own commits, whoever trained, and compares. Two of them,
because each shows what the other cannot:

- the loss of the step after a commit, which equals the reported one, to the bit on like devices;
- the loss of a batch of the hub's own, which depends on the weights alone. Who reports the truth in the first steps
  after commits and falsehoods in the others is seen here: the reported losses fall, and this one does not.

The hub's own batch is text of the training data, at a place that only the hub knows. Held-out text would not do: a
model that has seen its training text several times gets worse on other text, although nobody lies.
"""

import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, stdev

from thinpipe.checkpoint import Checkpoint
from thinpipe.config.run import RunConfig
from thinpipe.core.audit_events import AuditEvent, CommitMeasured, LossRecomputed
from thinpipe.core.events import Step
from thinpipe.core.files import write_atomically
from thinpipe.core.foreign import sanitize
from thinpipe.swarm.hub.commit_losses import CommitLosses, MeasuredCommit
from thinpipe.swarm.hub.layer_changes import LayerChanges
from thinpipe.training.recomputed_loss import loss_band

_REMEMBERED_STEPS = 10_000
"""Steps whose reported loss is kept. A commit is complete some steps after its own."""
_WINDOWS_STEPS = 5, 50
"""Steps before a commit whose mean reported loss is compared with the commit. The larger mean counts: where a loss has
just risen the long one lags behind, and the short one is noisy."""
_MIN_COMMITS, _MAX_COMMITS = 5, 20
"""Numbers of measured commits that tell by how much losses of batches differ: fewest, and how many of the last."""
_DEVIATIONS, _MIN_MARGIN = 5.0, 0.02
"""Margin of the hub's own batch: standard deviations of the difference between two batches, and a share of the loss."""
_MAX_PLACE = 1 << 31
_FIRST_SECONDS = 5.0
"""Before the first audit the hub waits as after one of this length: a run of a minute is not audited by default."""


class ReportedLosses:
    """The reported losses of the run as it stands: of steps that are computed again the newest. Pure."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        """Peers that compute the losses now: the one with the last segment. What the first peer reports of it is
        compared with the sums of the steps (`step_record.StepRecord`)."""
        self._losses: dict[int, tuple[float, list[str]]] = {}

    def on_generation(self, step: int, names: Sequence[str]) -> None:
        """These peers, in pipeline order, go on from the commit of this step. What was reported of later steps came
        from other weights."""
        self.peers = [names[-1]]
        self._losses = {known: entry for known, entry in self._losses.items() if known <= step}

    def on_step(self, event: Step) -> None:
        self._losses[event.step] = event.loss, self.peers
        if len(self._losses) > _REMEMBERED_STEPS:
            del self._losses[next(iter(self._losses))]

    def find(self, step: int) -> tuple[float, list[str]] | None:
        """The loss of a step and the peers that computed it; None: nothing was reported."""
        return self._losses.get(step)

    def is_behind(self, step: int) -> bool:
        """True if neither this step nor a later one has been reported."""
        return max(self._losses, default=0) < step

    def before(self, step: int) -> tuple[float, int] | None:
        """Mean loss of the last steps up to this one, and their number; None: nothing was reported."""
        windows = [
            [self._losses[known][0] for known in range(step - length + 1, step + 1) if known in self._losses]
            for length in _WINDOWS_STEPS
        ]
        return max(((fmean(window), len(window)) for window in windows if window), default=None)


class LossAudit:
    """Measures commits of a run in at most `share` of the time; 0: never. `band`: largest relative difference of a loss
    that devices and kernels explain. `folder` is emptied. `place`: that of the hub's own batch in the training text."""

    def __init__(
        self, folder: Path, *, share: float, band: float, place: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._share, self._band, self._clock = share, band, clock
        self._not_before = clock() + _FIRST_SECONDS * (1 / share - 1 if share else 0.0)
        self.reported = ReportedLosses()
        self.summary = ""
        """What was found last, in words; empty before the first audit."""
        self._commit_losses = CommitLosses(folder, place=place, clock=clock)
        self._waiting: tuple[MeasuredCommit, float] | None = None
        """A measured commit and the seconds that it took, while the step after it has not been reported."""
        self._differences: deque[float] = deque(maxlen=_MAX_COMMITS)
        """Loss of the hub's own batch minus that of the next step's batch, both computed by the hub."""
        self.changes = LayerChanges()
        self._last_measured = -1
        self._counts_up_to = math.inf
        """The commit that is being measured counts only up to this step: later commits are no longer any."""

    def on_step(self, event: Step) -> None:
        self.reported.on_step(event)

    def on_generation(self, newest: Checkpoint, names: Sequence[str], layers: Mapping[str, Sequence[str]]) -> None:
        """These peers, with these layers, go on from this commit; a commit after it is no longer one."""
        self.reported.on_generation(newest.manifest.step, names)
        self.changes.on_generation({layer: name for name, held in layers.items() for layer in held})
        if self._waiting is not None and self._waiting[0].step > newest.manifest.step:
            self._waiting = None
        self._counts_up_to = newest.manifest.step
        self.on_commit(newest)

    def on_commit(self, checkpoint: Checkpoint) -> None:
        """Measures this commit, if no other is being measured and it is time for one."""
        busy = self._commit_losses.is_running or self._waiting is not None
        if not self._share or busy or self._clock() < self._not_before:
            return
        if checkpoint.manifest.step == self._last_measured:
            return
        self._last_measured, self._counts_up_to = checkpoint.manifest.step, math.inf
        self._commit_losses.start(checkpoint)

    def poll(self) -> list[AuditEvent]:
        """What has been found since the last call."""
        ended = self._commit_losses.poll()
        if ended is not None:
            found, seconds = ended
            self._not_before = self._clock() + seconds * (1 / self._share - 1)
            if found is None:
                self.summary = (
                    f"FAILED: the loss of step {self._last_measured + 1} could not be computed again "
                    f"({sanitize(self._commit_losses.problem, 300)}); hub.log has it all"
                )
            if found is not None and found.step <= self._counts_up_to:
                self._waiting = found, seconds
        if self._waiting is None or self.reported.is_behind(self._waiting[0].step + 1):
            return []
        found, seconds = self._waiting
        self._waiting = None
        return self.findings(found, seconds)

    def close(self) -> None:
        self._commit_losses.close()

    def findings(self, found: MeasuredCommit, seconds: float) -> list[AuditEvent]:
        """What the losses of a commit show, compared with what was reported."""
        events: list[AuditEvent] = []
        reported = self.reported.find(found.step + 1)
        if reported is not None:  # else the step was skipped
            events.append(
                LossRecomputed(
                    step=found.step + 1,
                    reported=reported[0],
                    recomputed=found.next_step,
                    band=self._band,
                    peers=reported[1],
                    seconds=seconds,
                )
            )
        events.append(self._measured(found, seconds))
        if (unchanged := self.changes.on_commit(found.step, found.sketches)) is not None:
            events.append(unchanged)
        self._summarise(found, reported)
        return events

    def _measured(self, found: MeasuredCommit, seconds: float) -> CommitMeasured:
        difference = found.own_batch - found.next_step
        if math.isfinite(difference):
            self._differences.append(difference)
        window, known = self.reported.before(found.step), len(self._differences)
        margin = expected = None
        if known >= _MIN_COMMITS and window is not None:
            expected = fmean(self._differences)
            by_chance = _DEVIATIONS * stdev(self._differences) * math.sqrt(1 / known + 1 / window[1])
            margin = by_chance + _MIN_MARGIN * abs(found.own_batch)
        return CommitMeasured(
            step=found.step,
            loss=found.own_batch,
            reported=None if window is None else window[0],
            expected_difference=expected,
            margin=margin,
            peers=self.reported.peers,
            seconds=seconds,
        )

    def _summarise(self, found: MeasuredCommit, reported: tuple[float, list[str]] | None) -> None:
        first = "" if reported is None else f"{reported[0]:.4f} reported, "
        self.summary = (
            f"loss of step {found.step + 1}: {first}{found.next_step:.4f} recomputed by the hub; "
            f"hub's own batch with commit {found.step}: {found.own_batch:.4f}"
        )


def open_audit(config: RunConfig, *, share: float) -> LossAudit:
    """The audit of a hub's run."""
    folder = config.job.dump_folder / "hub"
    return LossAudit(
        folder / "audit", share=share, band=loss_band(config), place=_own_place(folder / "own_batch") if share else 0
    )


def _own_place(file: Path) -> int:
    """Place of the hub's own batch in the training text: the same at every start, and known to nobody else."""
    with suppress(OSError, ValueError):
        place = int(file.read_text("utf-8"))
        if 0 <= place < _MAX_PLACE:
            return place
    place = secrets.randbelow(_MAX_PLACE)
    with suppress(OSError):  # a full disk: another batch after the next start
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, str(place).encode())
    return place
