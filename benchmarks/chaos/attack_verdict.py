"""What came of the attacks of a chaos run, from its log: was each carried out, was the attacker named, and was anybody
else harmed? Pure.

What happens from an attack until the next one is laid at its door, unless a fault of ours explains it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.chaos.attacks.catalogue import ATTACK_NAMES, ATTACKS, AttackName, is_attacker, names_attacker
from benchmarks.chaos.attacks.order import Deed
from benchmarks.chaos.config import HUB
from benchmarks.chaos.log import AnyRecord, Exited, Happened, Named, Raised, Struck
from benchmarks.chaos.outages import Outage, members_at
from benchmarks.chaos.results import AttackResult
from thinpipe.core.event_text import format_event
from thinpipe.core.events import AnyEvent, Saved, Started
from thinpipe.core.hub_events import RUN_ENDING_CAUSES, GenerationEnded, GenerationStarted, PeerJoined, PeerLeft

LONGEST_SECONDS = 60.0
"""So long an attack may stop all computing. Beyond, it has halted the run."""
_WINDOW_SECONDS = 90.0
"""What comes later than this after an attack has another cause."""
REMOVED = ("accused", "refused", "kicked")
"""Causes with which a peer leaves for good, or is sent away."""
_AFTER_FAULT_SECONDS = 20.0
"""A peer may be lost for so long after the end of what we did to it."""
_ENOUGH = 80
"""Characters by which a line that the hub prints is known to be that of an event."""
_NO_BLAME = ("was admitted", "waiting for", "reply to")
"""Lines of the hub with the attacker's name that blame it for nothing: its joining, its absence, and that it wants no
answer."""


@dataclass(frozen=True)
class _Try:
    """One attack, with all that was logged until the next one."""

    struck: Struck
    records: Sequence[AnyRecord]
    deeds: Sequence[Deed]
    outages: Sequence[Outage]

    @property
    def name(self) -> str:
        return self.struck.kind


def judge_attacks(records: Sequence[AnyRecord], deeds: Sequence[Deed], outages: Sequence[Outage]) -> list[AttackResult]:
    """One for each kind that was ordered, in the order of the catalogue."""
    tries = list(_tries(records, deeds, outages))
    return [
        _judge(name, [each for each in tries if each.name == name], records)
        for name in ATTACK_NAMES
        if any(each.name == name for each in tries)
    ]


def _tries(records: Sequence[AnyRecord], deeds: Sequence[Deed], outages: Sequence[Outage]) -> Iterator[_Try]:
    struck = [r for r in records if isinstance(r, Struck) and r.kind in ATTACKS and not r.skipped]
    ends = [*(later.time_s for later in struck[1:]), float("inf")]
    for each, end in zip(struck, ends, strict=False):
        until = min(end, each.time_s + _WINDOW_SECONDS)
        again = next((r.time_s for r in struck if r.kind == each.kind and r.time_s > each.time_s), float("inf"))
        own = [deed for deed in deeds if deed.attack == each.kind and each.time_s <= deed.time_s < again]
        yield _Try(
            struck=each,
            records=[r for r in records if each.time_s <= _moment(r) < until],
            deeds=own[:1],
            outages=[outage for outage in outages if outage.faults and outage.faults[0] == each],
        )


def _moment(record: AnyRecord) -> float:
    return record.event.time_s if isinstance(record, Happened) else record.time_s


def _judge(name: AttackName, tries: Sequence[_Try], records: Sequence[AnyRecord]) -> AttackResult:
    blames = [_blame(each) for each in tries]
    stopped = [outage.executing_after for each in tries for outage in each.outages if len(outage.faults) == 1]
    return AttackResult(
        attack=name,
        ordered=len(tries),
        carried_out=sum(any(not deed.problem for deed in each.deeds) for each in tries),
        computing=sum(any(map(is_attacker, members_at(records, each.struck.time_s))) for each in tries),
        problems=[deed.problem for each in tries for deed in each.deeds if deed.problem],
        must_be_named=ATTACKS[name].named,
        named=sum(bool(blame) for blame in blames),
        named_by=next((blame for blame in blames if blame), ""),
        stopped_for=stopped,
        struck_off=sum(_struck_off(each) for each in tries),
        harm=[words for each in tries for words in _harm(each, records)]
        + [f"nothing was computed for {seconds:.0f} s" for seconds in stopped if seconds > LONGEST_SECONDS],
    )


def _blame(attack: _Try) -> str:
    """The first words of the hub that name the attacker; empty if there are none."""
    events = [r.event for r in attack.records if isinstance(r, Happened)]
    known = [text[:_ENOUGH] for event in events if names_attacker(text := format_event(event))]
    for record in attack.records:
        if isinstance(record, Happened) and _names_attacker(record.event):
            return format_event(record.event)
        if isinstance(record, Named) and not any(words in record.text for words in (*_NO_BLAME, *known)):
            return record.text
    return ""


def _names_attacker(event: AnyEvent) -> bool:
    """Not when it only takes part, comes back, or tells of another who was lost."""
    if isinstance(event, GenerationStarted | PeerJoined | Started | Saved) or not names_attacker(format_event(event)):
        return False
    if isinstance(event, PeerLeft):
        return is_attacker(event.peer) and event.cause != "restarted"
    if isinstance(event, GenerationEnded):
        reports_another = event.cause == "failed" and is_attacker(event.peer) and " is lost" in event.reason
        return event.cause not in ("rebalance", "restarted") and not reports_another
    return True


def _struck_off(attack: _Try) -> bool:
    return any(
        isinstance(r, Happened)
        and isinstance(r.event, PeerLeft)
        and is_attacker(r.event.peer)
        and r.event.cause in REMOVED
        for r in attack.records
    )


def _harm(attack: _Try, records: Sequence[AnyRecord]) -> Iterator[str]:
    """To the run and to the others."""
    for record in attack.records:
        if isinstance(record, Exited) and not is_attacker(record.who) and not _had_ended(record, records):
            yield f"{record.who} ended with {record.code}"
        if isinstance(record, Raised):
            yield f"the hub raised {record.text}"
        if not isinstance(record, Happened):
            continue
        event = record.event
        if isinstance(event, GenerationEnded) and event.cause in RUN_ENDING_CAUSES:
            yield f"the run was ended: {event.reason}"
        if isinstance(event, PeerLeft) and not is_attacker(event.peer):
            if event.cause in REMOVED:
                yield f"{event.peer} was removed: {event.reason}"
            elif event.cause != "restarted" and not _is_explained(event, records):
                yield f"{event.peer} was lost: {event.reason}"


def _had_ended(exited: Exited, records: Sequence[AnyRecord]) -> bool:
    """It was started again after it had ended just so, as one whose key opens nothing any more; or its removal was
    logged."""
    before = [r for r in records if isinstance(r, Exited) and r.who == exited.who and r.time_s < exited.time_s]
    if before and before[-1].code == exited.code:
        return True
    return any(
        isinstance(r, Happened)
        and isinstance(r.event, PeerLeft)
        and (r.event.peer, r.event.cause in REMOVED) == (exited.who, True)
        and r.event.time_s <= exited.time_s
        for r in records
    )


def _is_explained(left: PeerLeft, records: Sequence[AnyRecord]) -> bool:
    """By a fault of ours at this peer or at the hub."""
    return any(
        isinstance(r, Struck)
        and not r.skipped
        and r.kind not in ("poison", "second_hub")
        and r.victim in (left.peer, HUB)
        and r.time_s <= left.time_s <= r.time_s + r.seconds + _AFTER_FAULT_SECONDS
        for r in records
    )
