"""Judges a chaos run from its log and the undisturbed run: by hashes and by what the hub wrote. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks.chaos.attack_verdict import REMOVED, judge_attacks
from benchmarks.chaos.attacks.catalogue import is_attacker
from benchmarks.chaos.attacks.order import Deed
from benchmarks.chaos.attribution import BadMessage, attribute_faults, event_of
from benchmarks.chaos.config import HUB, ChaosConfig
from benchmarks.chaos.faults import REFUSED, UNDECIDED
from benchmarks.chaos.floors import shortfalls
from benchmarks.chaos.log import (
    AnyRecord,
    Committed,
    Ended,
    Exited,
    Happened,
    Hashed,
    Healed,
    Raised,
    Sampled,
    Struck,
)
from benchmarks.chaos.outages import Outage, find_outages, members_at
from benchmarks.chaos.results import SEVERAL, SeedResult, Usage
from thinpipe.core.event_text import format_event
from thinpipe.core.events import Started, Step
from thinpipe.core.hub_events import PeerJoined, PeerLeft, RolledBack

WARM_SECONDS = 60.0
"""First seconds of a process that do not count for its memory use; nor does the beginning of the run."""


BEYOND_STEPS = 1000
"""The undisturbed run is computed to the last commit; no run goes on further beyond it."""


@dataclass(frozen=True)
class Facts:
    """What is not in the log."""

    commits: Mapping[int, Mapping[str, str]]
    """Of the undisturbed run: sha256 by file."""
    steps: Mapping[int, tuple[float, float]]
    """Likewise: loss and norm of the gradient."""
    poisoned: Sequence[BadMessage] = ()
    """Bad messages that were sent."""
    deeds: Sequence[Deed] = ()
    """Attacks that were carried out."""


def judge(config: ChaosConfig, records: Sequence[AnyRecord], facts: Facts) -> SeedResult:
    result = _results(config, records, facts)
    return msgspec.structs.replace(result, shortfalls=shortfalls(config, result))


def _results(config: ChaosConfig, records: Sequence[AnyRecord], facts: Facts) -> SeedResult:
    struck = [r for r in records if isinstance(r, Struck)]
    done = [r for r in struck if not r.skipped]
    healed = [r for r in records if isinstance(r, Healed)]
    commits = [r for r in records if isinstance(r, Committed)]
    steps = [r.event for r in records if isinstance(r, Happened) and isinstance(r.event, Step)]
    true = [r for r in records if not _is_forged(r, facts)]
    outages = find_outages(true)
    by_fault = [outage for outage in outages if outage.faults]
    second = [r.detail for r in healed if r.kind == "second_hub"]
    decided = [detail for detail in second if detail != UNDECIDED]
    lost, given_up = _lost(records)
    poison = attribute_faults(records, facts.poisoned)
    counts = Counter(commit.step for commit in commits)
    ended = [r for r in records if isinstance(r, Ended)]
    return SeedResult(
        seed=config.seed,
        minutes=config.minutes,
        command=config.command,
        faults=dict(Counter(r.kind for r in done)),
        skipped=len(struck) - len(done),
        hits=dict(Counter(r.kind for r in done if r.victim == HUB or r.victim in members_at(records, r.time_s))),
        zombie_returns=len(zombies := _zombies(config, done, healed)),
        rejoined_after=_rejoined(records, zombies),
        commits=len(counts),
        commits_unequal=[commit.step for commit in commits if facts.commits.get(commit.step) != commit.files],
        commits_lost=lost,
        commits_given_up=given_up,
        files_on_disk=sum(len(r.files) for r in records if isinstance(r, Hashed)),
        files_unequal=_unequal_on_disk(records, facts),
        commits_doubled=[step for step, count in counts.items() if count > 1],
        steps_executed=len(steps),
        steps_compared=sum(step.step in facts.steps for step in steps),
        steps_unequal=[
            r.event.step
            for r in records
            if isinstance(r, Happened) and isinstance(r.event, Step) and _is_forged(r, facts)
        ],
        steps_skipped=_events(records, "skipped"),
        second_hubs_refused=sum(detail.startswith(REFUSED) for detail in decided),
        second_hubs_not_refused=[detail[:200] for detail in decided if not detail.startswith(REFUSED)],
        second_hubs_undecided=len(second) - len(decided),
        executing_after=[outage.executing_after for outage in by_fault],
        executing_with_standby=[outage.executing_after for outage in by_fault if outage.standby_present],
        executing_without_standby=[outage.executing_after for outage in by_fault if not outage.standby_present],
        executing_by_kind=_by_kind(by_fault),
        past_after=[outage.past_after for outage in by_fault if outage.past_after is not None],
        noticed_after=[outage.noticed_after for outage in by_fault if outage.noticed_after is not None],
        unexplained=[_words(outage) for outage in outages if not outage.faults],
        exits=[
            f"{r.who} with {r.code}: {r.tail[-200:]}"
            for r in records
            if isinstance(r, Exited) and not is_attacker(r.who)
        ],
        raised=[r.text for r in records if isinstance(r, Raised)],
        honest_removed=_honest_removed(records),
        attacks=judge_attacks(records, facts.deeds, outages),
        clean_steps_per_second=_rate(true, 0.0, config.clean_seconds),
        steps_per_second=_rate(true, config.clean_seconds, 60 * config.minutes),
        poisoned=len(facts.poisoned),
        poisoned_named=poison["named"],
        poisoned_together=poison["together"],
        poisoned_overtaken=poison["overtaken"],
        false_alarms=poison["alarms"],
        use=_use(records),
        problem=ended[-1].problem if ended else "it has not ended",
    )


def _is_forged(record: AnyRecord, facts: Facts) -> bool:
    """A step that the undisturbed run has computed otherwise, or that is beyond all that can have been computed: it is
    no progress."""
    if not (isinstance(record, Happened) and isinstance(record.event, Step) and facts.steps):
        return False
    step = record.event
    if step.step not in facts.steps:
        return step.step > max(facts.steps) + BEYOND_STEPS
    return facts.steps[step.step] != (step.loss, step.grad_norm)


def _honest_removed(records: Sequence[AnyRecord]) -> list[str]:
    left = [r.event for r in records if isinstance(r, Happened) and isinstance(r.event, PeerLeft)]
    return [event.reason for event in left if event.cause in REMOVED and not is_attacker(event.peer)]


def _by_kind(outages: Sequence[Outage]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for outage in outages:
        kind = outage.kinds[0] if len(outage.kinds) == 1 else SEVERAL
        found.setdefault(kind, []).append(outage.executing_after)
    return found


def _words(outage: Outage) -> str:
    back = "".join(f"; {r.victim} had come back from {r.kind}" for r in outage.returns)
    return f"{outage.why or 'the hub gave no reason'}{back}"


def _zombies(config: ChaosConfig, done: Sequence[Struck], healed: Sequence[Healed]) -> list[Healed]:
    """Those who were stopped, or cut off, for longer than it takes to be lost, and came back alive."""
    return [
        r
        for r in healed
        if not r.detail and any(_longer(config, fault, r) for fault in done if fault.victim == r.victim)
    ]


def _rejoined(records: Sequence[AnyRecord], zombies: Sequence[Healed]) -> list[float]:
    """Seconds until the hub lists the peer again. Not counted: peers that are struck once more before, or the hub."""
    found: list[float] = []
    for back in zombies:
        for r in records:
            if r.time_s < back.time_s:
                continue
            if isinstance(r, Struck) and not r.skipped and r.kind != "poison" and r.victim in (back.victim, HUB):
                break
            if isinstance(r, Happened) and isinstance(r.event, PeerJoined) and r.event.peer == back.victim:
                found.append(r.event.time_s - back.time_s)
                break
    return found


def _unequal_on_disk(records: Sequence[AnyRecord], facts: Facts) -> list[str]:
    """A file may be missing, if chaos has deleted it; none may differ."""
    return [
        f"{r.step}/{name}"
        for r in records
        if isinstance(r, Hashed)
        for name, sha256 in r.files.items()
        if facts.commits.get(r.step, {}).get(name) != sha256
    ]


def _longer(config: ChaosConfig, fault: Struck, back: Healed) -> bool:
    same = fault.kind == back.kind and fault.kind in ("stop", "cut", "deaf", "mute")
    return (
        same
        and abs(fault.clock_s + fault.seconds - back.clock_s) < 1
        and fault.seconds > config.heartbeat_timeout_seconds
    )


def _lost(records: Sequence[AnyRecord]) -> tuple[list[int], list[str]]:
    """Commits after which the run went on from an earlier one: steps of those without an event; texts of the others."""
    newest, lost, rolled_back = 0, list[int](), list[str]()
    for record in records:
        if isinstance(record, Committed):
            newest = max(newest, record.step)
        elif not isinstance(record, Happened):
            continue
        elif isinstance(record.event, RolledBack) and record.event.lost_step == newest:
            rolled_back.append(format_event(record.event))
            newest = record.event.step
        elif isinstance(record.event, Started) and record.event.step < newest:
            lost.append(newest)
    return lost, rolled_back


def _rate(records: Sequence[AnyRecord], begin: float, end: float) -> float:
    """Steps beyond all before, in a second of the clock."""
    reached = [(r.clock_s, r.event.step) for r in records if isinstance(r, Happened) and isinstance(r.event, Step)]
    first = max((step for clock, step in reached if clock <= begin), default=0)
    last = max((step for clock, step in reached if clock <= end), default=0)
    return (last - first) / (end - begin)


def _events(records: Sequence[AnyRecord], tag: str) -> int:
    return sum(isinstance(r, Happened) and event_of(r)["event"] == tag for r in records)


def _use(records: Sequence[AnyRecord]) -> list[Usage]:
    by_process: dict[tuple[str, int], list[Sampled]] = {}
    for record in records:
        if isinstance(record, Sampled) and not is_attacker(record.who):
            by_process.setdefault((record.who, record.pid), []).append(record)
    found: dict[str, Usage] = {}
    for (who, _), samples in by_process.items():
        warm = [
            sample
            for sample in samples
            if sample.time_s >= samples[0].time_s + WARM_SECONDS and sample.clock_s >= WARM_SECONDS / 2
        ]
        if len(warm) < 2:
            continue
        usage = Usage(
            who=who,
            minutes=(warm[-1].time_s - warm[0].time_s) / 60,
            first_rss_nbytes=warm[0].rss_nbytes,
            last_rss_nbytes=warm[-1].rss_nbytes,
            first_handles=warm[0].handles,
            last_handles=warm[-1].handles,
        )
        if who not in found or usage.minutes > found[who].minutes:
            found[who] = usage
    return list(found.values())
