"""Who is to blame when a step went wrong. Pure: every process finds the same from the same numbers.

What is bad makes bad whatever is computed from it. So the first in the order of computation is where it arose: states
go up the segments, then there is a loss, then gradients come down.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from thinpipe.pipeline.watch import End

NOT_FINITE, ABSURD = "is not finite", "is absurdly large"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What was bad first."""

    culprit: str
    """"state over boundary 0", "gradient over boundary 0", "loss", or a parameter that had a bad gradient."""
    sender: int
    """The process that had good input and gave bad output."""
    receiver: int | None = None
    """The process that found it in a message; only its word stands for it."""
    reason: str = NOT_FINITE
    boundary: int | None = None
    """That it crossed; None: it has not left the process where it arose."""
    forward: bool = True


class PoisonedError(Exception):
    """The same process has sent bad values twice in a step: the others should go on without it."""

    def __init__(self, step: int, fault: Fault) -> None:
        self.step, self.sender, self.receiver = step, fault.sender, fault.receiver
        self.what = f"{fault.culprit} {fault.reason}"
        super().__init__(f"process {self.sender} was wrong twice in step {step}: {self.what}")


def find_fault(
    not_finite: Mapping[End, float],
    absurd: Mapping[End, float],
    loss: float,
    norms: Mapping[str, float],
    *,
    homes: Sequence[int],
    segments: Mapping[str, int],
) -> Fault | None:
    """Bad messages by end, the loss and the norms of all gradients in layer order; the process of each segment and the
    segment of each parameter."""
    bad = [end for end in not_finite if not_finite[end] or absurd[end]]
    states = [boundary for boundary, forward in bad if forward]
    gradients = [boundary for boundary, forward in bad if not forward]

    def sent(boundary: int, *, forward: bool) -> Fault:
        return Fault(
            culprit=f"{'state' if forward else 'gradient'} over boundary {boundary}",
            sender=homes[boundary if forward else boundary + 1],
            receiver=homes[boundary + 1 if forward else boundary],
            reason=NOT_FINITE if not_finite[boundary, forward] else ABSURD,
            boundary=boundary,
            forward=forward,
        )

    if states:
        return sent(min(states), forward=True)
    if not math.isfinite(loss):
        return Fault(culprit="loss", sender=homes[-1])
    if gradients:
        return sent(max(gradients), forward=False)
    name = next((name for name, norm in norms.items() if not math.isfinite(norm)), None)
    return None if name is None else Fault(culprit=name, sender=homes[segments[name]])
