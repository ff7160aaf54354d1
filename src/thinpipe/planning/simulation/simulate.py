"""Discrete-event simulation of one optimiser step: passes in schedule order, messages on links.

Sends are asynchronous: a message is queued when the pass that produced it ends, and the sender goes on. A pass starts
when its process is free and its input message has passed the downlink. Stages of the same process exchange tensors in
no time. The step ends with the all-reduce and the optimiser. Deterministic: the same `StepSpec` gives the same times.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from thinpipe.planning.simulation.links import Framing, Hop, LinkSpec, Network
from thinpipe.planning.simulation.processors import Clock, processors
from thinpipe.planning.simulation.schedule_actions import Action, PassKind

SpanKind = Literal["forward", "backward", "input", "weight", "send", "optimiser"]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds per micro-batch and pass on an unshared processor. A full backward pass takes `input_s` + `weight_s`."""

    forward_s: float
    input_s: float
    weight_s: float

    def seconds(self, kind: PassKind, *, first: bool) -> float:
        """Seconds of a pass. The first stage has no input gradient, so torch computes its whole backward pass with the
        weight gradients."""
        if kind is PassKind.FORWARD:
            return self.forward_s
        if kind is PassKind.BACKWARD or (first and kind is PassKind.WEIGHT):
            return self.input_s + self.weight_s
        if kind is PassKind.INPUT:
            return 0.0 if first else self.input_s
        return self.weight_s


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """Everything that determines the duration of one step."""

    actions: list[list[Action]]
    """Passes of each process, in execution order."""
    stage_times: list[StageTimes]
    """Pass durations of each stage."""
    links: list[LinkSpec]
    """Link of each process."""
    hub: LinkSpec | None = None
    """Link of the hub that relays all messages. None: processes are connected directly."""
    forward_nbytes: int
    """Payload bytes of one micro-batch's forward message at a boundary."""
    backward_nbytes: int
    """Payload bytes of one micro-batch's backward message at a boundary."""
    labels_nbytes: int = 0
    """Payload bytes of one micro-batch's labels, from the process with the first stage to that with the last; 0: none
    are sent, because token ids are a part of the forward messages."""
    hosts: list[int] | None = None
    """Host index of each process. None: every process has its own host."""
    cores: dict[int, float] | None = None
    """Cores by host index; a host that is missing has a core for each of its processes."""
    allreduce_nbytes: int = 0
    """Payload bytes that each process contributes to the all-reduce at the end of the step. 0: no all-reduce, and so
    no barrier."""
    optimiser_s: list[float] = field(default_factory=list)
    """Seconds of the optimiser in each process; empty: 0 everywhere."""
    framing: Framing | None = None
    """Protocol overhead added to payloads. None: "nats" with a hub, "gloo" without."""


class Span(NamedTuple):
    """Interval in which a pass, a message or the optimiser occupied a process or a link; times in seconds."""

    process: int
    """Index of the process; for a message, of its sender. -1: the hub."""
    what: SpanKind
    stage: int
    """-1 for the all-reduce and the optimiser, as is `microbatch`."""
    microbatch: int
    start: float
    end: float
    link: str = ""
    """For a message, the name of the link: "up 0", "down 1", "hub up"; "link 0" and "hub" for half-duplex links."""


@dataclass(frozen=True)
class Timeline:
    """Result of a simulated step."""

    seconds: float
    """Duration of the step."""
    spans: list[Span]
    busy: list[float]
    """Seconds in which each process computed."""
    link_busy: dict[str, float]
    """Busy seconds by link name."""
    link_nbytes: dict[str, int]
    """Bytes on the wire by link name."""

    @property
    def bubble(self) -> float:
        """Mean share of the step in which a process did not compute, 0 to 1."""
        return 1 - sum(self.busy) / len(self.busy) / self.seconds if self.seconds else 0.0


__all__ = ["Span", "StageTimes", "StepSpec", "Timeline", "simulate"]

_WHAT: dict[PassKind, SpanKind] = {
    PassKind.FORWARD: "forward",
    PassKind.BACKWARD: "backward",
    PassKind.INPUT: "input",
    PassKind.WEIGHT: "weight",
}


def simulate(step_spec: StepSpec, *, record: bool = True) -> Timeline:
    """Simulates the step. `record`: keep spans; without them the timeline has totals only."""
    step = _Step(step_spec, record)
    step.clock.run()
    assert len(step.ended) == len(step_spec.actions), "a pass waits for a message that nobody sends"
    queues = step.network.queues
    return Timeline(
        seconds=max(step.ended.values()),
        spans=step.spans,
        busy=step.busy,
        link_busy={queue.name: queue.busy for queue in queues},
        link_nbytes={queue.name: queue.nbytes for queue in queues},
    )


class _Step:
    """State of the simulation. A message is identified by the pass that consumes it (its `purpose`)."""

    def __init__(self, step_spec: StepSpec, record: bool) -> None:
        self.step_spec, self.record, self.clock = step_spec, record, Clock()
        self.network = Network(
            step_spec.links, step_spec.hub, step_spec.framing or ("gloo" if step_spec.hub is None else "nats")
        )
        self.count, self.last_stage = len(step_spec.actions), len(step_spec.stage_times) - 1
        self.processors = processors(self.clock, step_spec.hosts or list(range(self.count)), step_spec.cores or {})
        self.home = {action.stage: process for process, actions in enumerate(step_spec.actions) for action in actions}
        self.spans: list[Span] = []
        self.busy, self.ended = [0.0] * self.count, dict[int, float]()
        self.next, self.contributions = [0] * self.count, 0
        self.awaited: list[Action | None] = [None] * self.count
        self.arrived: dict[Action, float] = {}
        for process in range(self.count):
            self.clock.at(0.0, self.start_next_pass, process)

    # Passes

    def start_next_pass(self, process: int) -> None:
        """Starts the process's next pass if its input has arrived, else records what the process waits for."""
        actions, index = self.step_spec.actions[process], self.next[process]
        if index == len(actions):
            self.all_reduce(process)
            return
        needed = self.needs(actions[index])
        if needed is None:
            self.begin(process, self.clock.now)
        elif needed in self.arrived:
            self.begin(process, max(self.clock.now, self.arrived.pop(needed)))
        else:
            self.awaited[process] = needed

    def needs(self, action: Action) -> Action | None:
        """Message that a pass consumes, or None. A gradient message is keyed as BACKWARD, for INPUT passes too."""
        stage, kind, microbatch = action
        if kind is PassKind.FORWARD:
            return action if stage else None
        if kind is PassKind.WEIGHT or stage == self.last_stage:
            return None
        return Action(stage, PassKind.BACKWARD, microbatch)

    def begin(self, process: int, start: float) -> None:
        action = self.step_spec.actions[process][self.next[process]]
        self.next[process] += 1
        if action.kind is PassKind.FORWARD and action.stage == 0:
            self.send_labels(process, action.microbatch)
        seconds = self.step_spec.stage_times[action.stage].seconds(action.kind, first=action.stage == 0)
        self.processors[process].compute(start, seconds, self.end, process, action, start)

    def send_labels(self, process: int, microbatch: int) -> None:
        """Labels leave before the state of their micro-batch, on its way or a shorter one: nobody waits for them."""
        last = self.home[self.last_stage]
        if self.step_spec.labels_nbytes and last != process:
            purpose = Action(self.last_stage, PassKind.FORWARD, microbatch)
            self.send(
                process, purpose, self.network.route(process, last, self.step_spec.labels_nbytes), lambda _at: None
            )

    def end(self, process: int, action: Action, start: float) -> None:
        stage, kind, microbatch = action
        self.record_span(process, _WHAT[kind], stage, microbatch, start)
        if kind is PassKind.FORWARD and stage < self.last_stage:
            self.hand_over(process, Action(stage + 1, PassKind.FORWARD, microbatch), self.step_spec.forward_nbytes)
        elif kind in (PassKind.BACKWARD, PassKind.INPUT) and stage > 0:
            self.hand_over(process, Action(stage - 1, PassKind.BACKWARD, microbatch), self.step_spec.backward_nbytes)
        self.start_next_pass(process)

    def record_span(self, process: int, what: SpanKind, stage: int, microbatch: int, start: float) -> None:
        self.busy[process] += self.clock.now - start
        if self.record:
            self.spans.append(Span(process, what, stage, microbatch, start, self.clock.now))

    def hand_over(self, process: int, purpose: Action, nbytes: int) -> None:
        target = self.home[purpose.stage]
        if target == process:
            self.arrived[purpose] = self.clock.now
        else:
            self.send(process, purpose, self.network.route(process, target, nbytes), self.deliver, target, purpose)

    def deliver(self, at: float, target: int, purpose: Action) -> None:
        if self.awaited[target] == purpose:
            self.awaited[target] = None
            self.begin(target, at)
        else:
            self.arrived[purpose] = at

    # Messages

    def send(
        self, sender: int, purpose: Action | None, route: list[Hop], then: Callable[..., None], *args: Any
    ) -> float:
        """Sends a message along `route` from now on. Returns when the first queue has sent all of it; calls `then` with
        the arrival time and `args`."""
        return self.transmit(sender, purpose, route, 0, self.clock.now, then, args)

    def transmit(
        self,
        sender: int,
        purpose: Action | None,
        route: list[Hop],
        index: int,
        began: float,
        then: Callable[..., None],
        args: tuple[Any, ...],
    ) -> float:
        hop = route[index]
        start, finish = hop.transmit(began, self.clock.now)
        if self.record and hop.seconds:
            stage, microbatch = (purpose.stage, purpose.microbatch) if purpose else (-1, -1)
            busy_from = max(start, finish - hop.seconds)  # idle while pieces come from a slower link
            self.spans.append(Span(sender, "send", stage, microbatch, busy_from, finish, hop.queue.name))
        if index + 1 == len(route):
            then(finish, *args)
        else:
            late = hop.latency
            self.clock.at(finish + late, self.transmit, sender, purpose, route, index + 1, start + late, then, args)
        return finish

    # The end of the step

    @property
    def centre(self) -> int | None:
        """Root of the all-reduce: None for the hub, else the last process (`transport/collectives.py`)."""
        return None if self.step_spec.hub is not None else self.count - 1

    def all_reduce(self, process: int) -> None:
        """Star all-reduce: contributions go to the centre, which sends the sums back to every process."""
        if self.count == 1 or not self.step_spec.allreduce_nbytes:
            self.optimise(process)
        elif process == self.centre:
            self.on_contribution()
        else:
            route = self.network.route(process, self.centre, self.step_spec.allreduce_nbytes)
            self.send(process, None, route, lambda at: self.clock.at(at, self.on_contribution))

    def on_contribution(self) -> None:
        self.contributions += 1
        if self.contributions < self.count:
            return
        left = self.clock.now
        for process in range(self.count):
            if process != self.centre:
                route = self.network.route(self.centre, process, self.step_spec.allreduce_nbytes)
                sender = -1 if self.centre is None else self.centre
                left = max(left, self.send(sender, None, route, self.on_result, process))
        if self.centre is not None:
            self.on_result(left, self.centre)

    def on_result(self, at: float, process: int) -> None:
        self.clock.at(at, self.optimise, process)

    def optimise(self, process: int) -> None:
        seconds = self.step_spec.optimiser_s[process] if self.step_spec.optimiser_s else 0.0
        start = self.clock.now
        self.processors[process].compute(start, seconds, self.on_optimiser_done, process, start)

    def on_optimiser_done(self, process: int, start: float) -> None:
        self.ended[process] = self.clock.now
        if self.step_spec.optimiser_s:
            self.record_span(process, "optimiser", -1, -1, start)
