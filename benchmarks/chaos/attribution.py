"""Bad messages of a chaos run: was each laid at the door of who sent it, and nobody else blamed? Pure."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from benchmarks.chaos.attacks.catalogue import is_attacker
from benchmarks.chaos.log import AnyRecord, Happened
from thinpipe.core.events import Started, Step


class BadMessage(NamedTuple):
    """A bad message."""

    sender: str
    step: int
    time_s: float


def attribute_faults(records: Sequence[AnyRecord], poisoned: Sequence[BadMessage]) -> Counter[str]:
    """How many bad messages were laid at the door of who sent them; how many came in one attempt with another one, of
    which the first is named; in how many attempts that another fault ended; and blame that nobody has earned."""
    events = [event_of(r) for r in records if isinstance(r, Happened)]
    blamed = {(event["sender"], event["step"]) for event in events if event["event"] in ("retried", "skipped")}
    sent = {(bad.sender, bad.step) for bad in poisoned}
    found = Counter(alarms=sum(not is_attacker(sender) for sender, _ in blamed - sent))
    for bad in poisoned:
        if (bad.sender, bad.step) in blamed:
            found["named"] += 1
        elif any(sender != bad.sender and step == bad.step for sender, step in blamed & sent):
            found["together"] += 1
        elif _was_overtaken(records, bad):
            found["overtaken"] += 1
    return found


def _was_overtaken(records: Sequence[AnyRecord], bad: BadMessage) -> bool:
    """A new generation began before this step was done."""
    for record in records:
        if isinstance(record, Happened) and record.event.time_s > bad.time_s:
            if isinstance(record.event, Started):
                return True
            if isinstance(record.event, Step) and record.event.step >= bad.step:
                return False
    return False


def event_of(record: Happened) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(record.event)
    return plain
