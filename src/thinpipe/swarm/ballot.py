"""The vote of every step, at the hub: what each peer has computed goes in, one answer for all comes out. Pure.

Each peer of an epoch gives its numbers for round 1, 2, 3 ... The hub answers when all have given theirs. Who asks
again, because an answer was lost, is told the same again: no peer can take a step that another was told not to take.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

MOST_NUMBERS = 1 << 20
_REMEMBERED = 2
"""Rounds: nobody is further behind, for a round ends only when all have asked for it."""

Kind = Literal["sum", "largest"]
Numbers = npt.NDArray[np.float64]


class VoteError(Exception):
    """A peer broke the rules of the ballot; the text says how."""


class Ballot:
    """Of one epoch."""

    def __init__(self, epoch: int, names: Sequence[str]) -> None:
        self.epoch, self.rounds = epoch, 0
        """Rounds that are decided."""
        self._names = list(names)
        self._given: dict[str, tuple[Kind, Numbers]] = {}
        self._decided: dict[int, Numbers] = {}

    def give(self, name: str, epoch: int, number: int, kind: Kind, numbers: Numbers) -> None:
        """Raises VoteError for anything but what this peer may say now."""
        if epoch != self.epoch or name not in self._names:
            raise VoteError(f"{name} is not of epoch {self.epoch}")
        if number in self._decided:
            return
        if number != self.rounds + 1:
            raise VoteError(f"{name} gives round {number} where {self.rounds + 1} is open")
        for other, (their_kind, theirs) in self._given.items():
            if (kind, len(numbers)) != (their_kind, len(theirs)):
                raise VoteError(
                    f"{name} gives {len(numbers)} numbers for a {kind} in round {number}, and {other} {len(theirs)} "
                    f"for a {their_kind}"
                )
        if len(numbers) > MOST_NUMBERS:
            raise VoteError(f"{name} gives {len(numbers)} numbers, more than the {MOST_NUMBERS} allowed")
        self._given.setdefault(name, (kind, numbers))
        if len(self._given) == len(self._names):
            self._decide(number, kind)

    def decision(self, number: int) -> Numbers | None:
        """None: some have still to vote."""
        return self._decided.get(number)

    def _decide(self, number: int, kind: Kind) -> None:
        stacked = np.stack([self._given[name][1] for name in self._names])
        self._decided[number] = stacked.sum(0) if kind == "sum" else stacked.max(0)
        self._decided.pop(number - _REMEMBERED, None)
        self._given, self.rounds = {}, number
