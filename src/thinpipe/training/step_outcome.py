"""Outcome of a step: what follows from the sum over all processes (`training.step_vector`), equal in every process."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from thinpipe.core.events import LinkTraffic
from thinpipe.pipeline.message_figures import Figures
from thinpipe.training.faults import Fault, find_fault
from thinpipe.training.step_vector import StepVector

_MAX_CREDIBLE = 2.0**63
"""Exclusive limit for byte counts and seconds reported by other processes; the event log holds 64-bit integers."""


@dataclass(frozen=True)
class BoundaryFigures:
    """What crossed a boundary in one direction in a step, by the figures of both ends."""

    boundary: int
    forward: bool
    sent: Figures
    received: Figures


@dataclass(frozen=True)
class StepOutcome:
    """Result of one step, the same in every process. With a fault, no state was changed."""

    loss: float
    grad_norm: float
    """Global gradient norm before clipping; NaN with a fault."""
    fault: Fault | None = None
    gradient_scale: float = 1.0
    """What the gradients have to be multiplied by, before clipping; not 1 for chats only (`StepVector.scale`)."""
    stop: bool = False
    """True if any process was asked to stop."""
    links: list[LinkTraffic] = field(default_factory=list)
    """Traffic per boundary and direction; only boundaries between processes."""
    busy: list[float] = field(default_factory=list)
    """Fraction of the step, per process, not spent waiting for messages; the rest is the pipeline bubble. Empty when no
    message crossed processes."""
    memory: list[int] = field(default_factory=list)
    """Peak memory in bytes of each process since its start: CUDA allocations on a GPU, else resident memory."""
    boundary_figures: list[BoundaryFigures] = field(default_factory=list)
    """Figures of the messages, at all boundaries."""


def outcome_of(
    vector: StepVector, numbers: Sequence[float], *, process_of_segment: Sequence[int], segments: Mapping[str, int]
) -> StepOutcome:
    """`numbers`: the sum. `process_of_segment`: rank by segment. `segments`: segment by parameter name."""
    loss, norms = vector.loss(numbers), vector.gradient_norms(numbers)
    fault = find_fault(
        vector.of_ends("not_finite", numbers),
        vector.of_ends("outliers", numbers),
        loss,
        norms,
        process_of_segment=process_of_segment,
        segments=segments,
    )
    took, idle, memory = (
        [_credible(number) for number in vector.of_processes(part, numbers)]
        for part in ("seconds", "idle_seconds", "peak_nbytes")
    )
    links = _links(vector, numbers, max(took) or math.inf)
    return StepOutcome(
        loss,
        math.sqrt(math.fsum(norm * norm for norm in norms.values())) if fault is None else math.nan,
        fault,
        gradient_scale=vector.scale(numbers),
        stop=vector.stops(numbers) > 0,
        links=links,
        busy=[1 - wait / whole if whole else 0.0 for wait, whole in zip(idle, took, strict=True)] if links else [],
        memory=list(map(int, memory)),
        boundary_figures=_boundary_figures(vector, numbers),
    )


def _boundary_figures(vector: StepVector, numbers: Sequence[float]) -> list[BoundaryFigures]:
    found = {part: vector.of_ends(part, numbers) for part in ("sent_rms", "sent_mean", "received_rms", "received_mean")}
    return [
        BoundaryFigures(
            end[0],
            end[1],
            Figures(found["sent_rms"][end], found["sent_mean"][end]),
            Figures(found["received_rms"][end], found["received_mean"][end]),
        )
        for end in vector.ends
    ]


def _links(vector: StepVector, numbers: Sequence[float], longest: float) -> list[LinkTraffic]:
    """Traffic between processes. `longest`: seconds of the longest pipeline run."""
    waited = vector.of_ends("waited_seconds", numbers)
    return [
        LinkTraffic(
            boundary=end[0],
            forward=end[1],
            nbytes=int(nbytes),
            waited_s=_credible(waited[end]),
            mbps=nbytes * 8e-6 / longest,
        )
        for end, announced in vector.of_ends("nbytes", numbers).items()
        if (nbytes := _credible(announced))
    ]


def _credible(announced: float) -> float:
    """A byte count or duration reported by another process; 0 if it is impossible (negative, NaN, too large)."""
    return announced if 0 <= announced < _MAX_CREDIBLE else 0.0
