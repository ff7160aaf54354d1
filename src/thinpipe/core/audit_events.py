"""Events of checks by which a run shows that what its peers report is true; part of the schema in `core.events`."""

import math
from typing import Annotated

import msgspec

from thinpipe.core.bounds import MAX_SEGMENTS, Count, Real, SegmentIndex, Text
from thinpipe.core.event_base import Event


class LossRecomputed(Event, frozen=True, kw_only=True, tag="loss_recomputed"):
    """The hub has computed the loss of a step again, from its commit before that step."""

    step: int
    reported: float
    """The loss that was reported for this step."""
    recomputed: float
    band: float
    """Largest relative difference that devices and kernels explain."""
    peers: list[str]
    """Peers that could have falsified the loss: the one with the last segment, which computes it."""
    seconds: float
    """Time that it took the hub."""

    @property
    def is_disputed(self) -> bool:
        return not abs(self.recomputed - self.reported) <= self.band * abs(self.recomputed)


class CommitMeasured(Event, frozen=True, kw_only=True, tag="commit_measured"):
    """The hub has computed the loss of its own batch from a commit. The batch is the same for all commits, so that this
    loss depends on their weights alone."""

    step: int
    """Step of the commit."""
    loss: float
    reported: float | None
    """Mean of the losses that were reported for the steps before the commit; None: none was."""
    expected_difference: float | None
    """Mean difference between the hub's own batch and other batches, by the hub's own computations; None: not yet
    known."""
    margin: float | None
    """Largest difference beyond the expected one that batches explain; None: not yet known."""
    peers: list[str]
    """Peers that could have falsified the reported losses, as in `LossRecomputed`."""
    seconds: float

    @property
    def is_disputed(self) -> bool:
        if self.reported is None or self.expected_difference is None or self.margin is None:
            return not math.isfinite(self.loss)
        return not self.loss - self.reported - self.expected_difference <= self.margin


class BoundaryAlarm(Event, frozen=True, kw_only=True, tag="boundary_alarm"):
    """What crosses a boundary has changed suddenly, or its two ends report different figures of it. Honest runs have
    shown no such change; a new kind of text or a bad setting can."""

    step: Count
    """The last of several steps in a row that show it."""
    boundary: SegmentIndex
    forward: bool
    """True: states. False: gradients."""
    kind: Text
    """One of size and mean (the figure of the receiver changed: the sender is named), ends differ in size and ends
    differ in mean (sender and receiver are named)."""
    figure: Real
    """Logarithm of the root mean square for sizes, or of the ratio between the ends; means in units of it."""
    usual: Real
    limit: Real
    """Largest distance from `usual` that honest steps have."""
    peers: Annotated[list[Text], msgspec.Meta(max_length=MAX_SEGMENTS)]
    """Who can have caused it."""

    @property
    def is_disputed(self) -> bool:
        return True


class LayersUnchanged(Event, frozen=True, kw_only=True, tag="layers_unchanged"):
    """Between two commits of one generation that the hub has measured, some layers have changed far less than others:
    the peers that hold them do not train them."""

    step: int
    """Step of the later commit."""
    since: int
    """Step of the earlier commit."""
    layers: list[str]
    peers: list[str]
    """Peers that hold these layers."""

    @property
    def is_disputed(self) -> bool:
        return True


AuditEvent = LossRecomputed | CommitMeasured | LayersUnchanged | BoundaryAlarm
