"""How the bench tells the hostile member what to do, and how that says what it has done: two files and a signal.

The environment of the member's program names the files. Every order and every line is JSON. An order lies there until
it is carried out.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from signal import SIGUSR2

import msgspec

from benchmarks.chaos.attacks.catalogue import AttackName
from thinpipe.core.files import write_atomically

ORDER, DEEDS = "THINPIPE_ATTACK_ORDER", "THINPIPE_ATTACK_DEEDS"
"""Variables with the names of the two files."""
SIGNAL = SIGUSR2
"""Asks the member to read its order."""


class Order(msgspec.Struct, frozen=True, kw_only=True):
    attack: AttackName
    seconds: float
    invite: str = ""
    """An invite that nobody has used."""


class Deed(msgspec.Struct, frozen=True, kw_only=True):
    """Something was sent, or could not be."""

    time_s: float
    attack: AttackName
    name: str
    """Of the member."""
    detail: str
    """What was sent, and what came back."""
    problem: str = ""
    """Why nothing was sent."""


def give(path: Path, order: Order) -> None:
    write_atomically(path, msgspec.json.encode(order))


def taken(path: Path) -> Order:
    return msgspec.json.decode(path.read_bytes(), type=Order)


def write_down(path: Path, attack: AttackName, name: str, detail: str, problem: str = "") -> None:
    deed = Deed(time_s=time.time(), attack=attack, name=name, detail=detail[:300], problem=problem[:300])
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(deed) + b"\n")


def read_deeds(path: Path) -> Iterable[Deed]:
    """A line that a crash cut short is passed over."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [msgspec.json.decode(line, type=Deed) for line in lines if line.endswith(b"}")]
