"""The time of one optimiser step, by letting it happen: passes in the order of the schedule, messages on their lines.

A message is sent at the end of the pass that made it, and nobody waits until it has left. A pass begins when its
process is free and its message is through the downlink. Stages of one process hand over at once. In the end come the
exchange and the optimiser. The same job gives the same times, always.
"""

from collections.abc import Callable
from typing import Any

from thinpipe.plan.actions import Action, Kind
from thinpipe.plan.job import Job, Span, StageWork, Timeline, What
from thinpipe.plan.lines import Hop, Network
from thinpipe.plan.processors import Clock, processors

__all__ = ["Job", "Span", "StageWork", "Timeline", "simulate"]

_WHAT: dict[Kind, What] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input",
    Kind.WEIGHT: "weight",
}


def simulate(job: Job, *, record: bool = True) -> Timeline:
    """Without `record` there are no spans."""
    step = _Step(job, record)
    step.clock.run()
    assert len(step.ended) == len(job.actions), "a pass waits for a message that nobody sends"
    queues = step.network.queues
    return Timeline(
        seconds=max(step.ended.values()),
        spans=step.spans,
        busy=step.busy,
        line_busy={queue.name: queue.busy for queue in queues},
        line_nbytes={queue.name: queue.nbytes for queue in queues},
    )


class _Step:
    """Its state while it happens. A message is named by the pass that it is for."""

    def __init__(self, job: Job, record: bool) -> None:
        self.job, self.record, self.clock = job, record, Clock()
        self.network = Network(job.lines, job.hub, job.framing or ("gloo" if job.hub is None else "nats"))
        self.count, self.last_stage = len(job.actions), len(job.works) - 1
        self.processors = processors(self.clock, job.hosts or list(range(self.count)), job.cores or {})
        self.home = {action.stage: process for process, actions in enumerate(job.actions) for action in actions}
        self.spans: list[Span] = []
        self.busy, self.ended = [0.0] * self.count, dict[int, float]()
        self.next, self.votes = [0] * self.count, 0
        self.awaited: list[Action | None] = [None] * self.count
        self.arrived: dict[Action, float] = {}
        for process in range(self.count):
            self.clock.at(0.0, self.go_on, process)

    # Passes

    def go_on(self, process: int) -> None:
        """With the next pass, if what it needs is there."""
        actions, index = self.job.actions[process], self.next[process]
        if index == len(actions):
            self.exchange(process)
            return
        needed = self.needs(actions[index])
        if needed is None:
            self.begin(process, self.clock.now)
        elif needed in self.arrived:
            self.begin(process, max(self.clock.now, self.arrived.pop(needed)))
        else:
            self.awaited[process] = needed

    def needs(self, action: Action) -> Action | None:
        """Gradients are for either kind of backward pass, and are named by the whole."""
        stage, kind, microbatch = action
        if kind is Kind.FORWARD:
            return action if stage else None
        if kind is Kind.WEIGHT or stage == self.last_stage:
            return None
        return Action(stage, Kind.BACKWARD, microbatch)

    def begin(self, process: int, start: float) -> None:
        action = self.job.actions[process][self.next[process]]
        self.next[process] += 1
        seconds = self.job.works[action.stage].seconds(action.kind, first=action.stage == 0)
        self.processors[process].compute(start, seconds, self.end, process, action, start)

    def end(self, process: int, action: Action, start: float) -> None:
        stage, kind, microbatch = action
        self.note(process, _WHAT[kind], stage, microbatch, start)
        if kind is Kind.FORWARD and stage < self.last_stage:
            self.hand_over(process, Action(stage + 1, Kind.FORWARD, microbatch), self.job.forward_nbytes)
        elif kind in (Kind.BACKWARD, Kind.INPUT) and stage > 0:
            self.hand_over(process, Action(stage - 1, Kind.BACKWARD, microbatch), self.job.backward_nbytes)
        self.go_on(process)

    def note(self, process: int, what: What, stage: int, microbatch: int, start: float) -> None:
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
        self, sender: int, purpose: Action | None, route: list[Hop], then: Callable[..., None], *given: Any
    ) -> float:
        """Returns when it has left. `then` is told when it will have arrived."""
        return self.cross(sender, purpose, route, 0, self.clock.now, then, given)

    def cross(
        self,
        sender: int,
        purpose: Action | None,
        route: list[Hop],
        index: int,
        began: float,
        then: Callable[..., None],
        given: tuple[Any, ...],
    ) -> float:
        hop = route[index]
        start, finish = hop.cross(began, self.clock.now)
        if self.record and hop.seconds:
            stage, microbatch = (purpose.stage, purpose.microbatch) if purpose else (-1, -1)
            busy_from = max(start, finish - hop.seconds)  # what comes slowly from another line is here in pieces
            self.spans.append(Span(sender, "send", stage, microbatch, busy_from, finish, hop.queue.name))
        if index + 1 == len(route):
            then(finish, *given)
        else:
            late = hop.latency
            self.clock.at(finish + late, self.cross, sender, purpose, route, index + 1, start + late, then, given)
        return finish

    # The end of the step

    @property
    def centre(self) -> int | None:
        """Who sums: the hub, or the last process (`transport/star.py`)."""
        return None if self.job.hub is not None else self.count - 1

    def exchange(self, process: int) -> None:
        """Numbers to the centre, and the sums back to everybody."""
        if self.count == 1 or not self.job.exchange_nbytes:
            self.optimise(process)
        elif process == self.centre:
            self.vote()
        else:
            route = self.network.route(process, self.centre, self.job.exchange_nbytes)
            self.send(process, None, route, lambda at: self.clock.at(at, self.vote))

    def vote(self) -> None:
        self.votes += 1
        if self.votes < self.count:
            return
        left = self.clock.now
        for process in range(self.count):
            if process != self.centre:
                route = self.network.route(self.centre, process, self.job.exchange_nbytes)
                sender = -1 if self.centre is None else self.centre
                left = max(left, self.send(sender, None, route, self.answered, process))
        if self.centre is not None:
            self.answered(left, self.centre)

    def answered(self, at: float, process: int) -> None:
        self.clock.at(at, self.optimise, process)

    def optimise(self, process: int) -> None:
        seconds = self.job.optimiser_s[process] if self.job.optimiser_s else 0.0
        start = self.clock.now
        self.processors[process].compute(start, seconds, self.over, process, start)

    def over(self, process: int, start: float) -> None:
        self.ended[process] = self.clock.now
        if self.job.optimiser_s:
            self.note(process, "optimiser", -1, -1, start)
