"""Who floods a service of the hub: counts dropped requests, decides for how long not to listen, and tells the owner.

An honest peer waits for replies before it asks again, so none of its requests is dropped. Where many of a peer are, the
hub stops listening to it at this one service for a while, and the server drops what it sends there; a peer that goes on
afterwards is named. Pure: `now` is in seconds of a monotonic clock.
"""

from dataclasses import dataclass

from thinpipe.core.units import format_bytes
from thinpipe.swarm.hub.services.budgets import BUDGETS, Priority
from thinpipe.swarm.protocol.names import JOIN

MAX_DROPPED, MAX_DROPPED_NBYTES = 16, 8 << 20
"""Dropped requests, or their bytes, after which the hub does not listen for a while."""
PROBATION_LIMIT = 8
"""Requests of a flooder that the server may hold for the hub after a pause: before the hub could stop listening again,
its queue would overflow."""
_FIRST_PAUSE_SECONDS = 1.0
_MAX_PAUSE_SECONDS, _MAX_URGENT_PAUSE_SECONDS = 32.0, 4.0
"""Every pause is twice as long as the last one, up to these; heartbeats have to come through in time."""
_FORGIVEN_SECONDS = 60.0
"""Seconds after a pause from which a new one is the first again."""
_PAUSES_BEFORE_NAMED = 2


@dataclass
class _Flood:
    """Dropped requests of one peer to one service."""

    began: float
    dropped: int = 0
    dropped_nbytes: int = 0
    total: int = 0
    total_nbytes: int = 0
    pauses: int = 0
    paused_until: float = 0.0
    named: bool = False


class Floods:
    """Dropped requests of all peers."""

    def __init__(self) -> None:
        self._floods: dict[tuple[str, str], _Flood] = {}

    def on_dropped(self, peer: str, service: str, nbytes: int, now: float) -> float | None:
        """Counts a dropped request. Returns for how many seconds the hub is not to listen to this peer at this
        service; None: it listens."""
        flood = self._floods.setdefault((peer, service), _Flood(now))
        if flood.pauses and now - flood.paused_until > _FORGIVEN_SECONDS:
            flood = self._floods[peer, service] = _Flood(now, named=flood.named)
        flood.dropped, flood.dropped_nbytes = flood.dropped + 1, flood.dropped_nbytes + nbytes
        flood.total, flood.total_nbytes = flood.total + 1, flood.total_nbytes + nbytes
        if now < flood.paused_until or (flood.dropped < MAX_DROPPED and flood.dropped_nbytes < MAX_DROPPED_NBYTES):
            return None
        urgent = service in BUDGETS and BUDGETS[service].priority == Priority.URGENT
        longest = _MAX_URGENT_PAUSE_SECONDS if urgent else _MAX_PAUSE_SECONDS
        seconds = min(_FIRST_PAUSE_SECONDS * 2.0**flood.pauses, longest)
        flood.dropped = flood.dropped_nbytes = 0
        flood.pauses += 1
        flood.paused_until = now + seconds
        return seconds

    def is_paused(self, peer: str, service: str, now: float) -> bool:
        """True if the hub does not listen now: what still arrives was in flight."""
        flood = self._floods.get((peer, service))
        return flood is not None and now < flood.paused_until

    def on_probation(self, peer: str, service: str, now: float) -> bool:
        """True if the hub has stopped listening to the peer at this service within the last minute."""
        flood = self._floods.get((peer, service))
        return flood is not None and flood.pauses > 0 and now - flood.paused_until < _FORGIVEN_SECONDS

    def name(self, peer: str, service: str, now: float) -> str:
        """What to print of this flood for the owner; empty: nothing, or it was printed already."""
        flood = self._floods[peer, service]
        if flood.named or flood.pauses < _PAUSES_BEFORE_NAMED:
            return ""
        flood.named = True
        who, remedy = peer, "Ask its user what it does, or remove it with `thinpipe kick`"
        if service == JOIN:
            who = f"the holder of invite {peer}"
            remedy = f"`thinpipe invite FOLDER --revoke {peer}` voids it; if a peer has used it, `thinpipe kick` does"
        return (
            f"{who} floods the hub: {flood.total} requests too many ({format_bytes(flood.total_nbytes)}) to "
            f"`{service}` in {now - flood.began:.1f} s. They are dropped, and the hub listens to {peer} there only now "
            f"and then; the peers go on. {remedy}"
        )

    def forget(self, peer: str) -> None:
        """The peer does not belong to the run any more."""
        self._floods = {key: flood for key, flood in self._floods.items() if key[0] != peer}

    def in_words(self, now: float) -> list[str]:
        """The floods of the last minute, for `thinpipe status`."""
        return [
            f"{peer} floods `{service}`: {flood.total} requests dropped ({format_bytes(flood.total_nbytes)})"
            for (peer, service), flood in self._floods.items()
            if flood.named and now - flood.paused_until < _FORGIVEN_SECONDS
        ]
