"""Settings of `python -m benchmarks.chaos`. No torch here, so that `--help` can show them at once."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from benchmarks.chaos.attacks.catalogue import ATTACK_NAMES, AttackName
from thinpipe.core.errors import UserError

Kind = Literal["kill", "stop", "cut", "deaf", "mute", "hub", "second_hub", "store", "disk", "poison"]
HUB = "hub"
"""The victim of a fault that is no peer; also the name of its program."""
KINDS: tuple[Kind, ...] = get_args(Kind)
CUTS: tuple[Kind, ...] = ("cut", "deaf", "mute")
"""Both directions; nothing reaches the peer; nothing leaves it."""


@dataclass(frozen=True, kw_only=True)
class ChaosConfig:
    """Real faults at moments drawn from a seed: does the run come to the same weights, bit for bit?

    A hub, some stages, a standby peer and a hostile member, each in a network of its own. Everything is logged in the
    output folder as it happens: run the same command again to go on after a break. Several seeds in one folder make one
    result.
    """

    seed: int = 1
    """Of the faults, the model and its data: a run that failed is run again with its seed."""
    minutes: float = 30.0
    """How long faults happen. Then everybody may come back, and the run goes on to one more commit."""
    output: Path = Path("bench_chaos")
    """Folder for the log and the run of each seed, chaos.json, chaos.md and chaos.png."""
    faults: tuple[Kind, ...] = KINDS
    """What may happen. kill: SIGKILL of a peer. stop: SIGSTOP for 5 to 60 s, and back as a zombie. cut, deaf, mute: its
    link is dead in both directions, inwards or outwards. hub: SIGKILL of the hub and its server. second_hub: another
    hub is started on the same folder. store: a layer of the newest commit is deleted at the hub. disk: a peer's or the
    hub's disk is full. poison: a peer sends a message that is not finite."""
    attacks: tuple[AttackName, ...] = ATTACK_NAMES
    """What the hostile member may send; benchmarks/chaos/attacks/catalogue.py says what each is. Nothing: it is not
    there."""
    without_cuts: bool = False
    """Without networks, so without `cut`, `deaf` and `mute`: for those who are not root."""
    stages: int = 4
    """Peers that compute."""
    standbys: int = 1
    """Peers that hold a copy of the checkpoint and compute nothing, ready to replace a lost peer."""
    steps_per_commit: int = 20
    """Optimiser steps between two commits."""
    clean_seconds: float = 60.0
    """Without a fault at the beginning: the speed that the rest is compared with."""
    heartbeat_timeout_seconds: float = 3.0
    """The hub declares a peer lost after this long without a heartbeat."""
    patience_seconds: float = 10.0
    """How long the hub waits for as many peers as before."""
    finish_seconds: float = 180.0
    """When the faults are over, the next commit must come within this time."""

    def __post_init__(self) -> None:
        if self.stages < 2 or self.standbys < 0:
            raise UserError("--stages must be at least 2 and --standbys at least 0")
        if 60 * self.minutes <= self.clean_seconds or self.clean_seconds < 5:
            raise UserError("--minutes must be longer than --clean-seconds, and that at least 5")
        if self.steps_per_commit < 1:
            raise UserError(f"--steps-per-commit must be at least 1, not {self.steps_per_commit}")
        if not (self.faults or self.attacks):
            raise UserError("--faults or --attacks must name something that is to happen")
        if len(set(self.faults)) < len(self.faults) or len(set(self.attacks)) < len(self.attacks):
            raise UserError("--faults and --attacks must name each kind once")

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Those that happen."""
        return tuple(kind for kind in self.faults if not (self.without_cuts and kind in CUTS))

    @property
    def peers(self) -> tuple[str, ...]:
        return tuple(f"p{index}" for index in range(self.stages + self.standbys))

    @property
    def folder(self) -> Path:
        """Of this seed."""
        return self.output / f"seed-{self.seed}"

    def poison_log(self, peer: str) -> Path:
        """A line for each bad message that this peer has sent."""
        return self.folder / f"poison-{peer}.jsonl"

    @property
    def attack_order(self) -> Path:
        """What the hostile member is to do next."""
        return self.folder / "attack-order.json"

    @property
    def attack_deeds(self) -> Path:
        """A line for each attack that it has carried out."""
        return self.folder / "attack-deeds.jsonl"

    @property
    def command(self) -> str:
        """That does it again."""
        words = [f"python -m benchmarks.chaos --seed {self.seed} --minutes {self.minutes:g}"]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("seed", "minutes", "output") or value == each.default:
                continue
            text = " ".join(value) if isinstance(value, tuple) else "" if value is True else f"{value:g}"
            words.append(f"--{each.name.replace('_', '-')} {text}".strip())
        return " ".join(words)
