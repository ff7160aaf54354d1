"""Outages of a chaos run, from its log: between two steps a new generation began. Which faults were it, for how long?

Pure. A fault counts if its victim belonged to the generation that ended, or is the hub; an outage without such a fault
is explained by nothing, unless somebody came back just then.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.attacks.catalogue import ATTACKS, is_attacker
from benchmarks.chaos.config import HUB
from benchmarks.chaos.log import AnyRecord, Begun, Happened, Healed, Struck
from thinpipe.core.events import AnyEvent, Started, Step
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerJoined, PeerLeft

MAX_LATE_SECONDS = 5.0
"""Steps in flight may still be reported for this long after a fault that ends their generation."""

_ATTACK_LATE_SECONDS = 1.0
"""Where a fault explains the outage, an attack counts only if steps followed it for less than this: most have no
effect."""


@dataclass(frozen=True, kw_only=True)
class Outage:
    last_step_s: float
    """When the last step before the outage was reported, in seconds since 1970."""
    began_s: float
    """The first fault; without any, the last step before."""
    noticed_s: float | None
    """When the hub ended the generation; None if it could not."""
    again_s: float
    """The first step of a later generation."""
    past_s: float | None
    """The first step beyond all before; None if it never came."""
    faults: tuple[Struck, ...]
    returns: tuple[Healed, ...]
    """Without a fault: who came back just before."""
    why: str
    """Why the hub ended the generation, in words."""
    standby_present: bool = False
    """An honest standby peer was connected when the outage began, and the hub was not the victim."""

    @property
    def executing_after(self) -> float:
        return self.again_s - self.began_s

    @property
    def past_after(self) -> float | None:
        return None if self.past_s is None else self.past_s - self.began_s

    @property
    def noticed_after(self) -> float | None:
        return None if self.noticed_s is None else self.noticed_s - self.began_s

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(fault.kind for fault in self.faults)


def find_outages(records: Sequence[AnyRecord]) -> list[Outage]:
    """In the order of time."""
    steps = [(r.event.time_s, r.event.step) for r in records if isinstance(r, Happened) and isinstance(r.event, Step)]
    starts = [r.event.time_s for r in records if isinstance(r, Happened) and isinstance(r.event, Started)]
    breaks = [r.time_s for r in records if isinstance(r, Begun)]
    outages: list[Outage] = []
    highest = 0
    for (before, step), (after, _) in itertools.pairwise(steps):
        highest = max(highest, step)
        if not any(before < start <= after for start in starts):
            continue
        # A break is logged after the first step that follows it.
        if any(before < moment <= after + MAX_LATE_SECONDS for moment in breaks):
            continue
        past = next((moment for moment, number in steps if moment >= after and number > highest), None)
        outages.append(_outage(records, before, after, past, outages[-1].again_s if outages else 0.0))
    return outages


def _outage(records: Sequence[AnyRecord], before: float, after: float, past: float | None, free: float) -> Outage:
    """`free`: when the outage before was over."""
    earliest = max(before - MAX_LATE_SECONDS, free)
    members = _members_of(records, earliest, before, after)
    struck = [
        r
        for r in records
        if isinstance(r, Struck)
        and not r.skipped
        and earliest <= r.time_s <= after
        and (r.victim == HUB or r.victim in members)
        and r.kind not in ("poison", "second_hub", *ATTACKS)
    ]
    attacks = [
        r
        for r in records
        if isinstance(r, Struck) and r.kind in ATTACKS and not r.skipped and earliest <= r.time_s <= after
    ]
    struck += [attack for attack in attacks if not struck or before - _ATTACK_LATE_SECONDS <= attack.time_s]
    struck.sort(key=lambda fault: fault.time_s)
    healed = [
        r
        for r in records
        if isinstance(r, Healed) and r.kind not in ("poison", *ATTACKS) and earliest <= r.time_s <= after
    ]
    began = struck[0].time_s if struck else before
    ends = [event for event in _ends(records) if began <= event.time_s <= after]
    standbys = {name for name in present_at(records, began) - members if not is_attacker(name)}
    return Outage(
        standby_present=bool(struck and standbys - {fault.victim for fault in struck})
        and all(r.victim != HUB for r in struck),
        last_step_s=before,
        began_s=began,
        noticed_s=ends[0].time_s if ends else None,
        again_s=after,
        past_s=past,
        faults=tuple(struck),
        returns=() if struck else tuple(healed),
        why=ends[0].reason if ends else "",
    )


def _members_of(records: Sequence[AnyRecord], earliest: float, before: float, after: float) -> set[str]:
    """Peers of the generation that ended: by the hub's event of its end, else the last one that began before."""
    ended = next((event.generation for event in _ends(records) if earliest <= event.time_s <= after), None)
    if ended is None:
        return members_at(records, before)
    return {
        peer.name
        for event in _events(records)
        if isinstance(event, GenerationStarted) and event.generation == ended
        for peer in event.peers
    }


def members_at(records: Sequence[AnyRecord], moment: float) -> set[str]:
    """Peers of the newest generation."""
    return set(newest_members([event for event in _events(records) if event.time_s <= moment]))


def present_at(records: Sequence[AnyRecord], moment: float) -> set[str]:
    """Peers that are connected to the hub, as far as the hub knows. A hub that was killed knows none."""
    kills = [r.time_s for r in records if isinstance(r, Struck) and r.kind == "hub" and not r.skipped]
    started = max((kill for kill in kills if kill <= moment), default=0.0)
    present: set[str] = set()
    for event in _events(records):
        if started <= event.time_s <= moment:
            if isinstance(event, PeerJoined):
                present.add(event.peer)
            elif isinstance(event, PeerLeft):
                present.discard(event.peer)
    return present


def newest_members(events: Sequence[AnyEvent]) -> list[str]:
    """Peers of the newest generation in these events, in pipeline order."""
    started = [event for event in events if isinstance(event, GenerationStarted)]
    return [peer.name for peer in started[-1].peers] if started else []


def _events(records: Sequence[AnyRecord]) -> list[AnyEvent]:
    return [record.event for record in records if isinstance(record, Happened)]


def _ends(records: Sequence[AnyRecord]) -> list[GenerationEnded]:
    return [event for event in _events(records) if isinstance(event, GenerationEnded)]
