"""Decides by majority which peer is removed for sending bad values. Pure.

All peers of a generation see the same values, so honest peers accuse the same peer for the same step. A peer is removed
when at least half of the other peers accuse it; its own accusation does not count. No second peer is removed for the
same step or one near it: if another machine fails there too, the cause is the run itself (see `messages.NEAR_STEPS`).
"""

from thinpipe.swarm.protocol.messages import Accusation, is_near_removal


class Accusations:
    """Accusations of the current generation, and the steps for which peers were removed."""

    def __init__(self) -> None:
        self._accusations: dict[str, Accusation] = {}
        self._generation = 0
        self._steps: set[int] = set()

    def add(self, accuser: str, accusation: Accusation, generation: int, names: list[str]) -> bool:
        """Adds an accusation. Returns True if the accused peer is to be removed. `names`: all peers of the
        generation."""
        if generation != self._generation:
            self._generation, self._accusations = generation, {}
        others = [name for name in names if name != accusation.name]
        if accuser not in others or accusation.name not in names or is_near_removal(accusation.step, self._steps):
            return False
        self._accusations[accuser] = accusation
        agree = sum(self._accusations.get(name) == accusation for name in others)
        if 2 * agree < len(others):
            return False
        self._steps.add(accusation.step)
        return True

    @property
    def steps(self) -> list[int]:
        """Steps for which a peer was removed, in ascending order."""
        return sorted(self._steps)
