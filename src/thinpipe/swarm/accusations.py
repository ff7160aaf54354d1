"""Peers say of one of them that it sends bad values. Pure: who is to be removed, and which steps have cost somebody.

All peers of an epoch see the same numbers, so honest ones accuse the same peer of the same step. One is removed when at
least half of the others say so; what it says of itself counts for nothing. Nobody is removed for the same step again,
or one near it: if another machine comes to the same, then it is the run itself.
"""

from collections.abc import Collection

from thinpipe.swarm.messages import Accusation

NEAR_STEPS = 3
"""Weights that have diverged stay so from step to step, also when an epoch begins between two of them; and another kind
of processor comes to it a little sooner or later."""


def is_near(step: int, removed_for: Collection[int]) -> bool:
    """Somebody was removed for this step or for one close to it."""
    return any(abs(step - each) < NEAR_STEPS for each in removed_for)


class Accusations:
    def __init__(self) -> None:
        self._given: dict[str, Accusation] = {}
        self._epoch = 0
        self._steps: set[int] = set()

    def give(self, accuser: str, accusation: Accusation, epoch: int, names: list[str]) -> bool:
        """True: the accused is to be removed. `names` are all of the epoch that both are of."""
        if epoch != self._epoch:
            self._epoch, self._given = epoch, {}
        others = [name for name in names if name != accusation.name]
        if accuser not in others or accusation.name not in names or is_near(accusation.step, self._steps):
            return False
        self._given[accuser] = accusation
        agree = sum(self._given.get(name) == accusation for name in others)
        if 2 * agree < len(others):
            return False
        self._steps.add(accusation.step)
        return True

    @property
    def steps(self) -> list[int]:
        """For which somebody was removed."""
        return sorted(self._steps)
