"""Generations of one replica, a whole pipeline: the running one or, between two, the one that ended last. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from thinpipe.planning.partition import Partition
from thinpipe.swarm.hub.present_peers import PresentPeers


@dataclass(frozen=True)
class Generation:
    """A set of peers computing together, with the segments of each."""

    number: int
    """Counts the generations of all replicas."""
    partition: Partition
    incarnations: Mapping[str, int]
    """Incarnation number of each peer, by name."""

    @property
    def names(self) -> list[str]:
        """Peer names in pipeline order."""
        return [name for name, _ in self.partition.stages]

    @property
    def shares(self) -> dict[str, int]:
        """Number of segments of each peer, by name."""
        return {name: len(segments) for name, segments in self.partition.stages}


@dataclass(frozen=True)
class GenerationEnd:
    """Why a generation ended; see the fields of `core.hub_events.GenerationEnded`."""

    cause: str
    reason: str
    peer: str = ""
    generation: int = 0
    """Number of the generation."""


@dataclass
class Replica:
    """One of the pipelines that train at the same time."""

    index: int
    """Its place among the replicas, from 0."""
    current: Generation | None = None
    """The running generation, if any."""
    latest: Generation | None = None
    """The running generation or, between two generations, the one that ended last."""
    problem: str = ""
    """Why no generation can begin with the present peers; empty if one can."""
    infeasible_for: object = None
    """Machines and hub rates for which partitioning failed: it is not tried again until they change."""
    _waiting_since: float | None = None
    """Time of the first request for something to do since the last generation ended."""
    _previous: Generation | None = None
    """Value of `latest` before the running generation, for `cancel_start`."""

    def begin(self, generation: Generation) -> None:
        self.problem, self.infeasible_for = "", None
        self._previous, self.current, self.latest = self.latest, generation, generation

    def cancel_start(self) -> None:
        """Undoes the start of the running generation, before any peer is assigned to it."""
        self.current, self.latest = None, self._previous

    def end(self) -> None:
        self.current, self._waiting_since = None, None

    def on_request(self, now: float) -> None:
        """A peer has asked for something to do."""
        if self.current is None and self._waiting_since is None:
            self._waiting_since = now

    def waited(self, now: float) -> float:
        """Seconds since somebody asked for something to do after the last generation."""
        return 0.0 if self._waiting_since is None else now - self._waiting_since

    def still_uploading(self, present: PresentPeers) -> list[str]:
        """Peers of the generation that ended last which have not asked what to do next: they may still be uploading
        their part of a checkpoint."""
        if self.latest is None:
            return []
        number, incarnations = self.latest.number, self.latest.incarnations
        peers = {name: present[name] for name in self.latest.names if name in present}
        return [name for name, peer in peers.items() if peer.number == incarnations[name] and peer.left < number]
