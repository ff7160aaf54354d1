"""Incarnations of peers: which process of a peer was started last, and how many there have been."""

from collections import Counter, defaultdict, deque
from functools import partial

_MAX_SUPERSEDED = 100
"""Superseded incarnation ids remembered per peer."""


class Incarnations:
    """Incarnations of all peers, present or absent: an absent process may come back unless a newer one was started."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._newest: dict[str, str] = {}
        self._superseded: defaultdict[str, deque[str]] = defaultdict(partial(deque, maxlen=_MAX_SUPERSEDED))
        """Older incarnation ids of each peer. Requests of such processes are ignored; otherwise two processes of one
        peer would end each other's generations."""

    def arrive(self, name: str, incarnation: str) -> int:
        """A process of the peer appears, or appears again. Returns how many have, this one included."""
        newest = self._newest.get(name, incarnation)
        if newest != incarnation:
            self._superseded[name].append(newest)
        self._newest[name] = incarnation
        self._counts[name] += 1
        return self._counts[name]

    def is_superseded(self, name: str, incarnation: str) -> bool:
        """True if a newer process of this peer has been started."""
        return name in self._superseded and incarnation in self._superseded[name]
