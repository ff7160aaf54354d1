"""Attribution of a faulty step (non-finite or absurdly large values) to the process that caused it.

Pure function of all-reduced numbers, so every process reaches the same verdict. Bad values spoil everything computed
from them, so the origin is the first bad value in order of computation: states forward through the segments, the loss,
gradients backward.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinpipe.pipeline.message_figures import BoundaryDirection

NOT_FINITE, ABSURD = "is not finite", "is absurdly large"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """First bad value of a step, in order of computation."""

    culprit: str
    """"state over boundary 0", "gradient over boundary 0", "loss", or a parameter that had a bad gradient."""
    sender: int
    """Rank of the process that produced the bad value from good inputs."""
    receiver: int | None = None
    """Rank of the process that detected the bad value in a received message. The fault is this process's unverified
    claim. None if no boundary was crossed."""
    reason: str = NOT_FINITE
    boundary: int | None = None
    """Boundary that the bad value crossed; None for a loss or a parameter gradient."""
    forward: bool = True
    """True for a state, False for a gradient; meaningless without a boundary."""


class PoisonedError(Exception):
    """A process sent bad values twice in the same step: the run should continue without that process."""

    def __init__(self, step: int, fault: Fault) -> None:
        self.step, self.sender, self.receiver = step, fault.sender, fault.receiver
        self.what = f"{fault.culprit} {fault.reason}"
        super().__init__(f"process {self.sender} sent bad values twice in step {step}: {self.what}")


def find_fault(
    not_finite: Mapping[BoundaryDirection, float],
    outliers: Mapping[BoundaryDirection, float],
    loss: float,
    norms: Mapping[str, float],
    *,
    process_of_segment: Sequence[int],
    segments: Mapping[str, int],
) -> Fault | None:
    """The fault of a step, or None.

    `not_finite` and `outliers`: number of bad messages per boundary and direction, with the same keys. `norms`:
    gradient norm of each parameter, in layer order. `process_of_segment`: rank by segment. `segments`: segment by
    parameter name.
    """
    bad = [end for end in not_finite if not_finite[end] or outliers[end]]
    states = [boundary for boundary, forward in bad if forward]
    gradients = [boundary for boundary, forward in bad if not forward]

    def sent(boundary: int, *, forward: bool) -> Fault:
        return Fault(
            culprit=f"{'state' if forward else 'gradient'} over boundary {boundary}",
            sender=process_of_segment[boundary if forward else boundary + 1],
            receiver=process_of_segment[boundary + 1 if forward else boundary],
            reason=NOT_FINITE if not_finite[boundary, forward] else ABSURD,
            boundary=boundary,
            forward=forward,
        )

    if states:
        return sent(min(states), forward=True)
    if not math.isfinite(loss):
        return Fault(culprit="loss", sender=process_of_segment[-1])
    if gradients:
        return sent(max(gradients), forward=False)
    name = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
    return None if name is None else Fault(culprit=name, sender=process_of_segment[segments[name]])
