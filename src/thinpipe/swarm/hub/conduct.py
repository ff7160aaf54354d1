"""Judges how a generation has ended: what peers say is compared with the hub's own record of its steps. Pure, except
that time is passed in.

A reason that the record shows is believed, whoever tells it. What only one peer says ends the generation and nothing
else: it counts against that peer (`suspects.Suspects`).
"""

from collections.abc import Callable, Collection, Sequence

from thinpipe.core.audit_events import BoundaryAlarm
from thinpipe.core.events import AnyEvent
from thinpipe.core.foreign import sanitize
from thinpipe.core.hub_events import HubEvent, PeerResumed, PeerSuspended
from thinpipe.swarm.hub.replica import Generation, GenerationEnd
from thinpipe.swarm.hub.step_record import Finding, StepLayout, StepRecord
from thinpipe.swarm.hub.suspects import Ruling, Suspects, describe
from thinpipe.swarm.protocol.messages import NextRequest

_ORDERLY_ENDS = {
    "finished": "the last step is computed",
    "not_saved": "the last step could not be saved",
}
"""By reason with which training stops (`core.events.Stopped`): message for people."""
_OUTSIDE_CAUSES = ("kicked", "rebalance", "accused")
"""Causes for the end of a generation that say nothing about the conduct of the peer."""
_MAX_ANNOUNCED = 10
"""False reports of a generation that are announced to the hub's owner."""


class Conduct:
    """Conduct of the peers of a replica. `members`: names of all peers of the run, present or absent."""

    def __init__(self, members: Callable[[], Collection[str]], suspects: Suspects) -> None:
        self.suspects, self.record = suspects, None
        self._members = members
        self._generation: Generation | None = None
        self._false_reports = 0
        """Of the first peer of the generation."""
        self._rulings: list[Ruling] = []
        self._suspended: list[Ruling] = []

    record: StepRecord | None
    """Steps of the running generation or, between two generations, of the one that ended last."""

    def begin(self, generation: Generation, layout: StepLayout, step: int) -> StepRecord:
        """A generation begins from the checkpoint of this step."""
        self._generation, alarms = generation, self.pop_alarms()
        self._false_reports = 0
        self.record = StepRecord(
            layout, generation.names, step=step, diverged_steps=tuple(self.suspects.diverged_steps)
        )
        self.record.alarms = alarms
        return self.record

    def pop_rulings(self) -> list[Ruling]:
        """Rulings since the last call that stop the run or strike off a key, which the caller carries out."""
        rulings, self._rulings = self._rulings, []
        return rulings

    def pop_alarms(self) -> list[BoundaryAlarm]:
        """Alarms that the sums of steps have shown since the last call."""
        if self.record is None:
            return []
        alarms, self.record.alarms = self.record.alarms, []
        return alarms

    def pop_events(self, step: int) -> list[HubEvent]:
        """Suspensions that have begun and ended since the last call. `step`: that of the newest commit."""
        suspended, self._suspended = self._suspended, []
        ended = self.suspects.suspensions.pop_ended()
        return [
            *(
                PeerSuspended(
                    step=step, peer=each.suspended, by=each.by, seconds=each.seconds, reason=sanitize(each.reason)
                )
                for each in suspended
            ),
            *(PeerResumed(step=step, peer=name, reason=why) for name, why in ended),
        ]

    def _add(self, ruling: Ruling) -> None:
        (self._suspended if ruling.suspended else self._rulings).append(ruling)

    def end_by_request(
        self, name: str, request: NextRequest, leaving: Sequence[str], now: float, *, stopping: bool = False
    ) -> GenerationEnd:
        """Why the generation ended, whose first peer that asks for something to do is `name`. `leaving`: peers that
        have announced that they leave. `stopping`: the hub has asked all to stop."""
        record, generation = self.record, self._generation
        assert record is not None
        assert generation is not None
        if record.finding is not None:
            return self._end_by_finding(record.finding, generation, now)
        reason = request.stop_reason
        if not (request.error or request.accusation) and reason:
            if reason == "not_finite" and not record.knows:
                return self._end_by_finding(_claimed(name, record), generation, now)
            believed = stopping or not record.knows or record.confirms(reason)
            if reason in _ORDERLY_ENDS and believed:
                return GenerationEnd(reason, _ORDERLY_ENDS[reason])
            if reason == "signal" and (leaving or believed):
                return _left(leaving or sorted(record.stoppers))
        return self._end_by_claim(name, request, generation, now)

    def _end_by_finding(self, finding: Finding, generation: Generation, now: float) -> GenerationEnd:
        ruling = self.suspects.on_finding(finding, generation.names, now, members=len(self._members()))
        self._add(ruling)
        if ruling.stop == "not_finite":
            return GenerationEnd("not_finite", "three steps in a row were skipped because they were not finite")
        suspect = ruling.suspended or ruling.expelled or finding.accused
        return GenerationEnd("accused", describe(finding), suspect)

    def _end_by_claim(self, name: str, request: NextRequest, generation: Generation, now: float) -> GenerationEnd:
        """The record shows no reason: it is what this peer says."""
        accusation, accused = request.accusation, ""
        if accusation is not None and accusation.name in generation.names and accusation.name != name:
            reason = (
                f"{name} says that {accusation.name} sent bad values twice in step {accusation.step}, which no sum of "
                "the steps shows"
            )
        elif request.error or accusation is not None:
            error = request.error or "it accuses a peer that does not take part in the generation"
            reason = f"{name} stopped ({error})"
            unlike = None if self.record is None else self.record.unlike
            if unlike is not None and name in unlike:
                (accused,) = set(unlike) - {name}
        elif request.stop_reason:
            reason = f'{name} says that training stopped ("{request.stop_reason}"), which no sum of the steps shows'
        else:
            reason = f"{name} asked what to do next"
        self._count(name, reason, now, accused=accused)
        return GenerationEnd("failed", reason, name)

    def on_departure(self, over: GenerationEnd | None, now: float) -> None:
        """A peer is gone or was restarted; `over`: how that ended the generation, if it did."""
        if over is not None and over.cause not in _OUTSIDE_CAUSES:
            self._count(over.peer, over.reason, now)

    def on_return(self, name: str, request: NextRequest, now: float) -> None:
        """A peer asks for something to do after a generation. Who has asked all to stop has left by then: who comes
        back instead has ended the generation for nothing."""
        record, generation = self.record, self._generation
        if record is None or generation is None or request.left_generation != generation.number:
            return
        if name in record.stoppers and request.stop_reason == "signal":
            record.stoppers.discard(name)
            self._count(name, f"{name} asked all to stop and has not left", now)

    def offence(self, now: float) -> GenerationEnd | None:
        """How the generation ends because of what a peer contributed to its sums, if it does."""
        record = self.record
        if record is None or record.offence is None:
            return None
        (name, what), record.offence = record.offence, None
        self._add(self.suspects.on_offence(name, what, now))
        return GenerationEnd("accused", what, name)

    def _count(self, name: str, reason: str, now: float, *, accused: str = "") -> None:
        ruling = self.suspects.on_end(name, reason, now, accused=accused)
        if ruling is not None:
            self._add(ruling)

    def compared(self, name: str, event: AnyEvent) -> tuple[AnyEvent | None, str]:
        """The event that the first peer reports, as it may enter the log, and what to tell the hub's owner of it."""
        if self.record is None:
            return None, ""
        true, wrong = self.record.compared(event)
        self._false_reports += bool(wrong)
        if not wrong or self._false_reports > _MAX_ANNOUNCED:
            return true, ""
        more = "; what follows of this kind is not said before the next generation"
        return true, f"{name} reports {wrong}{more if self._false_reports == _MAX_ANNOUNCED else ''}"


def _left(names: Sequence[str]) -> GenerationEnd:
    """A peer has left in order. If nobody has announced it, the announcement was lost, or went to an earlier start of
    the hub."""
    return GenerationEnd("left", f"{' and '.join(names) or 'a peer'} left", names[0] if names else "")


def _claimed(name: str, record: StepRecord) -> Finding:
    """What the only peer of a generation says of its last three steps."""
    return Finding(
        step=max(1, record.finished - 2),
        suspects=frozenset({name}),
        accused=name,
        what="it reports values that are not finite",
        skipped=True,
    )
