"""A run of a hub in simulated time, with the real membership, sums and judgement, and peers of which some are hostile.

Every segment has one parameter. Honest peers contribute what they should, see what a receiver sees, and follow the
sums; what hostile ones contribute and say is given by `Attack`.
"""

from dataclasses import dataclass

import numpy as np

from thinpipe.core.errors import UserError
from thinpipe.core.numerics import numerics
from thinpipe.planning.partition import Partition
from thinpipe.swarm.hub.conduct import Conduct
from thinpipe.swarm.hub.membership import Membership
from thinpipe.swarm.hub.replica import GenerationEnd
from thinpipe.swarm.hub.services.reduction import ReductionError, StepReduction
from thinpipe.swarm.hub.step_record import StepLayout
from thinpipe.swarm.hub.suspects import Suspects
from thinpipe.swarm.hub.suspensions import Suspensions
from thinpipe.swarm.protocol.machine_report import MachineReport, ProcessorReport
from thinpipe.swarm.protocol.messages import Accusation, NextRequest, is_near
from thinpipe.training.attempts import MAX_CONSECUTIVE_SKIPS, Attempts
from thinpipe.training.step_outcome import outcome_of
from thinpipe.training.step_vector import LOSS, StepVector

SEGMENTS = 6
STEPS = 10_000
INTERVAL = 5
"""Steps between commits."""
REPORT = MachineReport(
    processor=ProcessorReport(device="cpu", threads=1, flops=1e9, memory_nbytes=1 << 30),
    up_bps=5.0,
    down_bps=5.0,
    latency_s=0.1,
    versions={},
)


def layout(shares, steps=STEPS):
    names = {f"weight.{segment}": segment for segment in range(SEGMENTS)}
    return StepLayout(
        vector=StepVector(list(names), boundaries=SEGMENTS - 1, processes=len(shares)),
        process_of_segment=[rank for rank, share in enumerate(shares) for _ in range(share)],
        segments=names,
        steps=steps,
    )


def contribution(step_layout, rank, *, loss=2.0, stop=0.0, norms=1.0, bad=(), received=()):
    """Of an honest process; or with another loss, stop flag or norms, and bad messages received at these ends.
    `received`: root mean squares of what was received, by end."""
    own = {name: norms for name, segment in step_layout.segments.items() if process_of(step_layout, segment) == rank}
    numbers = step_layout.vector.pack(
        loss=loss if process_of(step_layout, SEGMENTS - 1) == rank else 0.0,
        stops=stop,
        gradient_norms=own,
        of_ends={"not_finite": dict.fromkeys(bad, 1.0), "received_rms": dict(received)},
        of_process={"seconds": 1.0, "idle_seconds": 0.5, "peak_nbytes": 1e6},
        rank=rank,
    )
    return np.array(numbers)


def process_of(step_layout, segment):
    return step_layout.process_of_segment[segment]


def cuts(step_layout):
    """Ends of boundaries between two processes: sender, receiver and end."""
    of = step_layout.process_of_segment
    for boundary in range(SEGMENTS - 1):
        if of[boundary] != of[boundary + 1]:
            yield of[boundary], of[boundary + 1], (boundary, True)
            yield of[boundary + 1], of[boundary], (boundary, False)


@dataclass(frozen=True)
class Attack:
    """What a hostile peer does in one generation, from its step `after` on."""

    kind: str
    after: int = 0
    whom: int = 0


SAID = {
    "accuses": lambda victim: {"accusation": Accusation(name=victim, step=3, what="bad"), "error": "bad"},
    "fails": lambda _: {"error": "out of memory"},
    "asks": lambda _: {},
    "has finished": lambda _: {"stop_reason": "finished"},
    "was stopped": lambda _: {"stop_reason": "signal"},
    "did not save": lambda _: {"stop_reason": "not_saved"},
    "has diverged": lambda _: {"stop_reason": "not_finite"},
}
"""Attacks that end a generation with a request."""
CONTRIBUTED = ("finds bad values", "sends bad values", "loss", "norms", "stops", "foreign numbers", "too short")
KINDS = (*SAID, *CONTRIBUTED, "starts again", "behaves")


class World:
    """Members `names`; of these at most `most` compute at once. `needed`: least number of machines that hold the
    model."""

    def __init__(self, names, attacks, *, most=SEGMENTS, needed=1, diverges_at=None):
        self.names, self.attacks, self.diverges_at = list(names), attacks, diverges_at
        """`attacks`: by name of a hostile peer, what it does in one generation after the other. `diverges_at`: step
        from which the weights are bad."""
        self.now, self.committed, self.stopped = 0.0, 0, ""
        self.expelled, self.events, self.ends = [], [], []
        self.conduct = Conduct(lambda: self.names, Suspects(Suspensions()))
        self.membership = Membership(
            wanted=len(self.names),
            partitioner=lambda machines, _up, _down: self._partition(machines, most, needed),
            hub_bps=(1e6, 1e6),
            patience_seconds=5.0,
            suspensions=self.conduct.suspects.suspensions,
            judge=lambda _generation, name, request, leaving: self.conduct.end_by_request(
                name, request, leaving, self.now
            ),
        )
        self.starts = dict.fromkeys(self.names, 0)

    def _partition(self, machines, most, needed):
        if len(machines) < needed:
            raise UserError(f"the model needs {needed} machines")
        names = [machine.name for machine in machines][:most]
        at = [SEGMENTS * i // len(names) for i in range(len(names) + 1)]
        stages = tuple((name, range(at[i], at[i + 1])) for i, name in enumerate(names))
        return Partition(stages=stages, standbys=(), too_small=(), loads=(), tokens_per_second=1.0, bottleneck="")

    def ask(self, name, **fields):
        request = NextRequest(incarnation=f"{name}{self.starts[name]}", numerics=numerics(), report=REPORT, **fields)
        known = self.membership.present.incarnation_of(name)
        over = self.membership.on_next_request(name, request, self.now)
        if known not in (None, request.incarnation):
            self.conduct.on_departure(over, self.now)
        self.conduct.on_return(name, request, self.now)
        self._carry_out(over)
        return self.membership.next_for(name, self.now)

    def _carry_out(self, over):
        for ruling in self.conduct.pop_rulings():
            self.stopped = self.stopped or ruling.stop
            if ruling.expelled:
                self.expelled.append(ruling.expelled)
                self.names.remove(ruling.expelled)
                self.membership.drop_peer(ruling.expelled, "accused", "")
        self.events += self.conduct.pop_events(self.committed)
        if over is not None:
            self.ends.append(over)

    def run(self, generations, max_steps=12):
        """Runs so many generations, or until the run stops."""
        for _ in range(generations):
            self._assemble()
            if self.stopped or self.membership.replicas[0].current is None:
                return
            self._compute(max_steps)
            if self.stopped:
                return

    def _assemble(self):
        left = self.membership.last_generation  # one that begins while some still ask is not left by them
        for _ in range(20):
            self.now += 1.0
            self.conduct.suspects.suspensions.expire(self.now)
            for name in self.names:
                self.ask(name, left_generation=left)
            self._carry_out(None)
            if self.membership.replicas[0].current is not None or self.stopped:
                return

    def _compute(self, max_steps):
        """One generation: until a peer ends it, or for so many steps, after which all stop in order."""
        generation = self.membership.replicas[0].current
        names, shares = generation.names, list(generation.shares.values())
        step_layout = layout(shares)
        record = self.conduct.begin(generation, step_layout, self.committed)
        reduction, attempts = StepReduction(generation.number, names, record), Attempts()
        attacks = {name: next(self.attacks[name], Attack("behaves")) for name in names if name in self.attacks}
        diverged, done, round_number = list(self.conduct.suspects.diverged_steps), 0, 0
        while done < max_steps:
            self.now += 1.0
            begun = {name: attack for name, attack in attacks.items() if done >= attack.after}
            if ended := next((name for name in begun if begun[name].kind in (*SAID, "starts again")), None):
                self._say(ended, begun[ended], generation)
                self._all_ask(generation, {})
                return
            if len(names) == 1:
                done, self.committed = done + 1, self.committed + 1
                self.conduct.suspects.on_commit(self.committed)
                continue
            round_number += 1
            step = record.finished + 1
            for rank, name in enumerate(names):
                values = self._contribution(step_layout, rank, name, begun, step)
                try:
                    reduction.contribute(name, generation.number, round_number, "step", values)
                except ReductionError:
                    self._carry_out(end := self.conduct.offence(self.now))
                    assert self.membership.end(generation, end)
                    assert end.peer == name
                    self._all_ask(generation, {})
                    return
            outcome = outcome_of(
                step_layout.vector,
                reduction.result(round_number).tolist(),
                process_of_segment=step_layout.process_of_segment,
                segments=step_layout.segments,
            )
            verdict = attempts.judge(outcome.fault, may_accuse=not is_near(step, diverged))
            if verdict == "accuse":
                accusation = Accusation(name=names[outcome.fault.sender], step=step, what="bad")
                self._all_ask(generation, {"accusation": accusation, "error": "bad"})
                return
            if attempts.skips == MAX_CONSECUTIVE_SKIPS:
                self._all_ask(generation, {"stop_reason": "not_finite"})
                return
            if outcome.stop:
                self._commit(record.finished)
                self._all_ask(generation, {"stop_reason": "signal"})
                return
            if verdict in ("good", "skip"):
                done += 1
                if record.finished % INTERVAL == 0:
                    self._commit(record.finished)
        assert self.membership.end(generation, GenerationEnd("deadlock", "they wait"))
        self._all_ask(generation, {})

    def _commit(self, step):
        self.committed = step
        self.conduct.suspects.on_commit(step)

    def _contribution(self, step_layout, rank, name, begun, step):
        changes = {"bad": [end for _, receiver, end in cuts(step_layout) if receiver == rank and self._bad(step)]}
        ends = list(cuts(step_layout))
        for other, attack in begun.items():
            if attack.kind == "sends bad values":
                at = self.membership.replicas[0].current.names.index(other)
                sent = [(receiver, end) for sender, receiver, end in ends if sender == at]
                receiver, end = sent[attack.whom % len(sent)]
                changes["bad"] += [end] if receiver == rank else []
        attack = begun.get(name)
        if attack is None:
            return contribution(step_layout, rank, **changes)
        if attack.kind == "finds bad values":
            received = [end for _, receiver, end in ends if receiver == rank]
            changes["bad"] += [received[attack.whom % len(received)]]
        if attack.kind == "loss":
            changes["loss"] = np.nan
        if attack.kind == "norms":
            changes["norms"] = np.inf
        if attack.kind == "stops":
            changes["stop"] = 1.0
        values = contribution(step_layout, rank, **changes)
        if attack.kind == "foreign numbers":
            values[step_layout.vector.parts[LOSS]] += 1.0
            values[0] += 1e9
        return values[:-1] if attack.kind == "too short" else values

    def _bad(self, step):
        return self.diverges_at is not None and step >= self.diverges_at

    def _say(self, name, attack, generation):
        if attack.kind == "starts again":
            self.starts[name] += 1
            self.ask(name)
            return
        others = [other for other in self.names if other != name]
        victim = others[attack.whom % len(others)] if others else name
        self.ask(name, left_generation=generation.number, **SAID[attack.kind](victim))

    def _all_ask(self, generation, fields):
        for name in list(generation.names):
            if name in self.names:
                self.ask(name, left_generation=generation.number, **fields)
