"""Outages of a chaos run, from its log: between two steps a new generation began. Which faults were it, for how long?

Pure. A fault counts if its victim belonged to the generation that ended, or is the hub; an outage without such a fault
is explained by nothing, unless somebody came back just then.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.config import HUB
from benchmarks.chaos.log import AnyRecord, Begun, Happened, Healed, Said, Struck
from thinpipe.core.events import Started, Step

MAX_LATE_SECONDS = 5.0
"""Steps in flight may still be reported for this long after a fault that ends their generation."""
_LOG_DELAY_SECONDS = 0.5
"""Until a line that the hub prints is in the log."""
_BEGAN = re.compile(r"^generation (\d+): segments (.*?);", re.M)
_THERE, _GONE = re.compile(r"(\S+) is there"), re.compile(r"(\S+) (is lost|has left|was )")
_OVER = re.compile(r"generation (\d+) is over: (.*)")


@dataclass(frozen=True, kw_only=True)
class Outage:
    last_step_s: float
    """When the last step before the outage was reported, in seconds since 1970."""
    began_s: float
    """The first fault; without any, the last step before."""
    noticed_s: float | None
    """When the hub said that the generation is over; None if it could not."""
    again_s: float
    """The first step of a later generation."""
    past_s: float | None
    """The first step beyond all before; None if it never came."""
    faults: tuple[Struck, ...]
    returns: tuple[Healed, ...]
    """Without a fault: who came back just before."""
    why: str
    """The hub's words."""
    standby_present: bool = False
    """A standby peer was connected when the outage began, and the hub was not the victim."""

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
        and r.kind not in ("poison", "second_hub")
    ]
    healed = [r for r in records if isinstance(r, Healed) and r.kind != "poison" and earliest <= r.time_s <= after]
    began = struck[0].time_s if struck else before
    overs = [
        (r.time_s, found[2])
        for r in records
        if isinstance(r, Said) and began <= r.time_s <= after and (found := _OVER.match(r.text))
    ]
    standbys = present_at(records, began) - members
    return Outage(
        standby_present=bool(struck and standbys - {fault.victim for fault in struck})
        and all(r.victim != HUB for r in struck),
        last_step_s=before,
        began_s=began,
        noticed_s=overs[0][0] if overs else None,
        again_s=after,
        past_s=past,
        faults=tuple(struck),
        returns=() if struck else tuple(healed),
        why=overs[0][1] if overs else "",
    )


def _members_of(records: Sequence[AnyRecord], earliest: float, before: float, after: float) -> set[str]:
    """Who computed in the generation that ended: the one of which the hub says so, or the last one begun before."""
    said = [r for r in records if isinstance(r, Said)]
    over = next((found[1] for r in said if earliest <= r.time_s <= after and (found := _OVER.match(r.text))), None)
    if over is None:
        return members_at(records, before + _LOG_DELAY_SECONDS)
    return set(members_in("\n".join(r.text for r in said if r.text.startswith(f"generation {over}: "))))


def members_at(records: Sequence[AnyRecord], moment: float) -> set[str]:
    """Of the newest generation."""
    return set(members_in("\n".join(r.text for r in records if isinstance(r, Said) and r.time_s <= moment)))


def present_at(records: Sequence[AnyRecord], moment: float) -> set[str]:
    """Who is there in the hub's eyes."""
    present: set[str] = set()
    for record in records:
        if record.time_s > moment:
            break
        if isinstance(record, Struck) and record.kind == "hub" and not record.skipped:
            present.clear()
        elif isinstance(record, Said) and (found := _THERE.match(record.text)):
            present.add(found[1])
        elif isinstance(record, Said) and (found := _GONE.match(record.text)):
            present.discard(found[1])
    return present


def members_in(printed: str) -> list[str]:
    """Of the newest generation in what a hub has printed."""
    found = _BEGAN.findall(printed)
    return [part.split(":")[0].strip() for part in found[-1][1].split(",")] if found else []
