"""When which fault happens to whom: drawn from a seed, before anything runs. Pure.

Faults come one after the other with time to get ahead in between; now and then a second one comes during the recovery
from the first. Of the peers, at most two are away at a time.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.chaos.attacks.catalogue import ATTACKER, ATTACKS, AttackName
from benchmarks.chaos.config import HUB, ChaosConfig, Kind

PER_MINUTE: dict[Kind, float] = {
    "kill": 0.7,
    "stop": 0.27,
    "cut": 0.27,
    "deaf": 0.14,
    "mute": 0.14,
    "hub": 0.25,
    "second_hub": 0.04,
    "store": 0.12,
    "disk": 0.07,
    "poison": 2.4,
}
"""So that three runs of half an hour have more than 50 kills, 20 stops, 20 cuts of each sort, 20 kills of the hub, 10
lost layers and 200 poisonings."""
MINUTES_PER_ATTACK = 15.0
"""Each attack comes once in this time."""
COMPANIONS = 0.15
"""The share of faults that come during the recovery from the one before."""
MAX_AWAY = 2
SETTLE_SECONDS = 12.0
"""After its return a peer is left alone for so long, unless nobody else is there."""
TAIL_SECONDS = 10.0
"""Before the end nothing new happens."""
_SECONDS: dict[Kind, Callable[[random.Random], float]] = {
    "kill": lambda draw: draw.uniform(1, 8),
    "stop": lambda draw: 5 * 12 ** draw.random(),  # 5 to 60, short ones as likely as long ones
    "cut": lambda draw: draw.uniform(5, 25),
    "deaf": lambda draw: draw.uniform(5, 25),
    "mute": lambda draw: draw.uniform(5, 25),
    "hub": lambda _: 1.0,
    "second_hub": lambda _: 45.0,  # it has to load, and waits for the folder
    "store": lambda _: 4.0,
    "disk": lambda draw: draw.uniform(5, 15),
    "poison": lambda _: 0.0,
}


@dataclass(frozen=True, order=True)
class Fault:
    at: float
    """Seconds since the run began."""
    kind: Kind | AttackName
    victim: str
    """A peer, `hub`, or of an attack who attacks."""
    seconds: float
    """Until it is undone."""

    @property
    def until(self) -> float:
        return self.at + self.seconds


def make_schedule(config: ChaosConfig) -> list[Fault]:
    """In the order of time."""
    draw = random.Random(f"thinpipe chaos {config.seed}")
    kinds = [kind for kind in config.kinds if kind != "poison" for _ in range(_count(kind, config.minutes))]
    draw.shuffle(kinds)
    faults: list[Fault] = []
    for at, kind in zip(_moments(len(kinds), config, draw), kinds, strict=True):
        seconds = _SECONDS[kind](draw)
        faults.append(Fault(at, kind, _victim(kind, at, faults, config, draw), seconds))
    if "poison" in config.kinds:
        count = _count("poison", config.minutes)
        for at in sorted(draw.uniform(config.clean_seconds, _end(config)) for _ in range(count)):
            faults.append(Fault(at, "poison", _victim("poison", at, faults, config, draw), 0.0))
    return sorted([*faults, *_attacks(config)])


def _attacks(config: ChaosConfig) -> list[Fault]:
    """Drawn apart from the faults, at whatever moments these come; each has a slot of its own with some play."""
    draw = random.Random(f"thinpipe chaos attacks {config.seed}")
    names = [name for name in config.attacks for _ in range(max(1, round(config.minutes / MINUTES_PER_ATTACK)))]
    draw.shuffle(names)
    width = (_end(config) - config.clean_seconds) / max(1, len(names))
    return [
        Fault(config.clean_seconds + width * (slot + draw.uniform(0, 0.4)), name, ATTACKER, ATTACKS[name].seconds)
        for slot, name in enumerate(names)
    ]


def _count(kind: Kind, minutes: float) -> int:
    return max(1, math.ceil(PER_MINUTE[kind] * minutes - 1e-9))


def _end(config: ChaosConfig) -> float:
    return 60 * config.minutes - min(TAIL_SECONDS, (60 * config.minutes - config.clean_seconds) / 2)


def _moments(count: int, config: ChaosConfig, draw: random.Random) -> list[float]:
    """One for each fault: a slot of its own with some play, or shortly after the one before."""
    companions = [index > 0 and draw.random() < COMPANIONS for index in range(count)]
    slots = count - sum(companions)
    width = (_end(config) - config.clean_seconds) / max(1, slots)
    moments: list[float] = []
    slot = 0
    for companion in companions:
        if companion:
            moments.append(moments[-1] + draw.uniform(0.5, min(6.0, width / 2)))
        else:
            moments.append(config.clean_seconds + width * (slot + draw.uniform(0, 0.4)))
            slot += 1
    return moments


def _victim(kind: Kind, at: float, before: Sequence[Fault], config: ChaosConfig, draw: random.Random) -> str:
    if kind in ("hub", "second_hub"):
        return HUB
    away = {fault.victim for fault in before if fault.kind != "poison" and fault.at <= at <= fault.until + 1}
    if kind == "disk" and HUB not in away and draw.random() < 0.5:
        return HUB
    settling = {fault.victim for fault in before if fault.at <= at <= fault.until + SETTLE_SECONDS}
    there = [peer for peer in config.peers if peer not in away]
    if kind != "poison" and len(config.peers) - len(there) >= MAX_AWAY:
        # One more would leave too few: it happens to one who is away already, which must not harm either.
        return draw.choice(sorted(away - {HUB}))
    calm = [peer for peer in there if peer not in settling]
    return draw.choice(calm or there)
