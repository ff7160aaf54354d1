"""Peers say of one of them that it sends bad values. Pure: who is to be removed, and which steps have cost somebody.

All peers of an epoch see the same numbers, so honest ones accuse the same peer of the same step. One is removed when at
least half of the others say so; what it says of itself counts for nothing. Nobody is removed for the same step again:
if another machine comes to the same, then it is the run itself.
"""

from thinpipe.swarm.messages import Accusation


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
        if accuser not in others or accusation.name not in names or accusation.step in self._steps:
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
