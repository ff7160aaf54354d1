"""The hub's own record of the steps of a generation, from the vectors that it sums: which steps were computed, with
which loss, who contributed what is bad, and who asked to stop. What peers report is compared with it. Pure.

In a generation of one peer nothing is summed: then the record is what that peer reports (`knows` is False).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from thinpipe.config.run import RunConfig
from thinpipe.core.audit_events import BoundaryAlarm
from thinpipe.core.events import AnyEvent, Retried, Skipped, Step, Stopped
from thinpipe.models.protocol import PipelineModel, trainable_parameters
from thinpipe.pipeline.placement import place
from thinpipe.swarm.protocol.messages import is_near
from thinpipe.training.attempts import MAX_CONSECUTIVE_SKIPS, Attempts
from thinpipe.training.boundary_watch import BoundaryWatch
from thinpipe.training.faults import Fault
from thinpipe.training.step_outcome import StepOutcome, outcome_of
from thinpipe.training.step_vector import (
    GRADIENT_NORMS,
    LOSS,
    PER_BOUNDARY_DIRECTION,
    PER_BOUNDARY_SENDER,
    PER_PROCESS,
    STOPS,
    TRAINED_TOKENS,
    StepVector,
)

_EVENTS, _EVENTS_PER_STEP = 20, 10
"""Events beside those of steps that the first peer may report in a generation, and more for each of its steps. Training
reports fewer than half as many."""
_REMEMBERED_STEPS = 1000
"""Number of latest steps of which loss and norm are kept for events that arrive late."""
Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepLayout:
    """What the hub has to know of a generation to read the vectors of its steps."""

    vector: StepVector
    process_of_segment: Sequence[int]
    """Rank by segment."""
    segments: Mapping[str, int]
    """Segment by parameter name."""
    steps: int
    """Number of steps of the run."""
    basis_interval: int = 0
    """Steps between two changes of basis; 0: none."""

    def owners(self) -> npt.NDArray[np.int64]:
        """Rank of the only process that may contribute each number; -1: all may."""
        vector, process_of = self.vector, self.process_of_segment
        owners = np.full(vector.size, -1)
        owners[vector.parts[GRADIENT_NORMS]] = [process_of[self.segments[name]] for name in vector.parameters]
        for part in (LOSS, TRAINED_TOKENS):
            owners[vector.parts[part]] = process_of[-1]
        receivers = [process_of[boundary + 1 if forward else boundary] for boundary, forward in vector.ends]
        for part in PER_BOUNDARY_DIRECTION:
            owners[vector.parts[part]] = receivers
        senders = [process_of[boundary if forward else boundary + 1] for boundary, forward in vector.ends]
        for part in PER_BOUNDARY_SENDER:
            owners[vector.parts[part]] = senders
        for part in PER_PROCESS:
            owners[vector.parts[part]] = range(vector.processes)
        return owners


def make_step_layout(
    model: PipelineModel, config: RunConfig, shares: Sequence[int], *, chats: bool = False
) -> StepLayout:
    """For a generation whose peers have these numbers of segments, in pipeline order. `chats`: what it trains on."""
    segments = model.segments
    names = {name: index for index, segment in enumerate(segments) for name in trainable_parameters(segment)}
    schedule = config.parallelism.pipeline_parallel_schedule
    placement = place(schedule, len(shares), len(segments), shares)
    return StepLayout(
        vector=StepVector(
            list(names),
            boundaries=len(segments) - 1,
            processes=len(shares),
            batch_tokens=config.training.global_batch_size * config.training.seq_len if chats else None,
        ),
        process_of_segment=placement.process_of_segment,
        segments=names,
        steps=config.training.steps,
        basis_interval=config.basis.interval,
    )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Bad values that end a generation, as the sums of its steps show them."""

    step: int
    """The step whose values were bad, or the first of those that were skipped."""
    suspects: frozenset[str]
    """One of these peers is at fault, unless the run itself has diverged. Empty: no single peer can be."""
    accused: str = ""
    """The peer that sent the bad values, or had them in its own part."""
    accuser: str = ""
    """The peer that found bad values in what `accused` had sent: its word alone."""
    what: str
    skipped: bool
    """True: three steps in a row were skipped. False: the same peer was at fault twice in one step."""


class StepRecord:
    """Steps of one generation. `names`: its peers in pipeline order. `step`: that of the checkpoint it starts from.
    `diverged_steps`: see `messages.Assignment`."""

    def __init__(
        self, layout: StepLayout, names: Sequence[str], *, step: int, diverged_steps: Sequence[int] = ()
    ) -> None:
        self.finished, self.layout, self.knows = step, layout, len(names) > 1
        """`finished`: number of the last step that was computed or skipped."""
        self.finding: Finding | None = None
        """Why the peers have to end the generation; None: they have not."""
        self.stoppers: set[str] = set()
        """Peers that have asked all to save and to stop."""
        self.offence: tuple[str, str] | None = None
        """The first peer that contributed what no honest peer does, and what that was."""
        self.unlike: tuple[str, str] | None = None
        """Two peers that contributed different operations or lengths to one all-reduce: one of them is wrong."""
        self.alarms: list[BoundaryAlarm] = []
        """Sudden changes of what crosses the boundaries, until somebody takes them."""
        self._watch = BoundaryWatch(layout.process_of_segment, names.__getitem__, basis_interval=layout.basis_interval)
        self._names, self._diverged_steps, self._owners = list(names), diverged_steps, layout.owners()
        self._attempts = Attempts()
        self._suspects: set[str] = set(names)
        """Peers that may have caused all that was bad since the last good step."""
        self._first_bad = 0
        self._begun_at, self._others, self._last_reported = step, 0, step
        """Step from which the generation starts, events reported beside those of steps, and the last step reported."""
        self._figures: dict[int, tuple[float, float]] = {}
        """Loss and gradient norm, by step."""
        self._faults: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED_STEPS)
        """Step and sender of the latest bad attempts."""

    def refuse(self, name: str, values: Values) -> str:
        """Why this contribution to the vector of a step is refused, in words; empty: it is not. The first refusal is
        kept as `offence`."""
        vector, rank = self.layout.vector, self._names.index(name)
        why = ""
        if len(values) != vector.size:
            why = f"{name} contributes {len(values)} numbers to the vector of a step, which has {vector.size}"
        elif values[(self._owners != rank) & (self._owners != -1)].any():  # NaN counts as non-zero
            why = f"{name} contributes numbers of other peers to the vector of a step"
        elif vector.stops(values.tolist()) not in (0.0, 1.0):
            why = f"{name} asks to stop {vector.stops(values.tolist())} times in one step"
        if why and self.offence is None:
            self.offence = name, why
        return why

    def add(self, contributions: Mapping[str, Values], total: Values) -> None:
        """Adds an attempt at a step: what each peer contributed, and the sum that all get."""
        vector, numbers = self.layout.vector, total.tolist()
        outcome = outcome_of(
            vector, numbers, process_of_segment=self.layout.process_of_segment, segments=self.layout.segments
        )
        if vector.stops(numbers):
            self.stoppers |= {name for name, values in contributions.items() if values[vector.parts[STOPS]].any()}
        step, fault = self.finished + 1, outcome.fault
        verdict = self._attempts.judge(fault, may_accuse=not is_near(step, self._diverged_steps))
        if fault is None:
            self._good(step, outcome)
            return
        self._faults.append((step, self._names[fault.sender]))
        if verdict == "retry":  # it may have been chance
            return
        self._first_bad = self._first_bad or step
        self._suspects &= {self._names[rank] for rank in (fault.sender, fault.receiver) if rank is not None}
        if verdict == "skip":
            self.finished = step
        if verdict == "accuse" or self._attempts.skips == MAX_CONSECUTIVE_SKIPS:
            self.finding = self._found(fault, skipped=verdict == "skip")

    def _good(self, step: int, outcome: StepOutcome) -> None:
        self.finished, self._first_bad, self._suspects = step, 0, set(self._names)
        self._figures[step] = outcome.loss, outcome.grad_norm
        self._figures.pop(step - _REMEMBERED_STEPS, None)
        self.alarms += self._watch.observe(step, outcome.boundary_figures)

    def _found(self, fault: Fault, *, skipped: bool) -> Finding:
        return Finding(
            step=self._first_bad,
            suspects=frozenset(self._suspects),
            accused=self._names[fault.sender],
            accuser="" if fault.receiver is None else self._names[fault.receiver],
            what=f"{fault.culprit} {fault.reason}",
            skipped=skipped,
        )

    def compared(self, event: AnyEvent) -> tuple[AnyEvent | None, str]:
        """The event that a peer reports, as it may enter the log, and what is wrong with it, in words. None: it may
        not."""
        if not isinstance(event, Step):
            self._others += 1
            if self._others > _EVENTS + _EVENTS_PER_STEP * (self.finished - self._begun_at):
                return None, "more events than its steps have, which are not logged"
        match event:
            case Step() if event.step <= self._last_reported:
                return None, f"step {event.step} again"
            case Step() | Skipped() if not self.knows:
                self.finished = max(self.finished, min(event.step, self.layout.steps))
                if isinstance(event, Step):
                    self._last_reported = event.step
            case Step():
                return self._step(event)
            case BoundaryAlarm() if self.knows:  # the hub has seen the same
                return None, ""
            case Retried() | Skipped() if self.knows and (event.step, event.sender) not in self._faults:
                return None, f"a fault of {event.sender} in step {event.step}, which no sum of the steps shows"
            case Stopped(reason="not_finite"):  # the hub writes it when it believes so
                return None, "" if self.finding is not None or not self.knows else self._not_shown(event.reason)
            case Stopped() if self.knows and not self.confirms(event.reason):
                return None, self._not_shown(event.reason)
        return event, ""

    def _step(self, event: Step) -> tuple[Step | None, str]:
        if event.step not in self._figures:
            return None, f"step {event.step}, which was not computed"
        self._last_reported = event.step
        loss, norm = self._figures[event.step]
        if (event.loss, event.grad_norm) == (loss, norm):
            return event, ""
        return msgspec.structs.replace(event, loss=loss, grad_norm=norm), (
            f"loss {event.loss:.6g} and gradient norm {event.grad_norm:.6g} for step {event.step}, and the sum of that "
            f"step has {loss:.6g} and {norm:.6g}, which are logged"
        )

    def _not_shown(self, reason: str) -> str:
        return f'the end of the run ("{reason}") at step {self.finished}, which no sum of the steps shows'

    def confirms(self, reason: str) -> bool:
        """True if training may have stopped with this reason, one of `core.events.Stopped`."""
        finished = self.finished >= self.layout.steps
        by_reason = {"finished": finished, "signal": bool(self.stoppers), "not_saved": finished or bool(self.stoppers)}
        return by_reason.get(reason, False)
