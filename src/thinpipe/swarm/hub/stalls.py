"""Stall detection: finds peers whose heartbeats arrive but which neither make progress nor wait for another peer.

The deadline is measured: a multiple of the longest time that this peer has needed between two actions (message, hub
reply, step) within a step. A peer that waits for another one is not stalled. Pure: `now` is in seconds of a monotonic
clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinpipe.transport.nats.activity import Heartbeat

_MIN_MEASURED_STEPS = 2
"""Steps before a measured deadline applies: the first step of a generation compiles and is not measured."""


@dataclass(frozen=True)
class Stall:
    """A peer that has made no progress within its deadline."""

    name: str
    seconds: float
    """Seconds without progress."""
    deadline: float
    """Deadline in seconds."""

    @property
    def message(self) -> str:
        """How the stall was noticed, in words."""
        return (
            f"it sends heartbeats, but has computed nothing for {self.seconds:.0f} s, and its deadline is "
            f"{self.deadline:.0f} s"
        )


@dataclass
class _Member:
    """State of one peer of the generation."""

    share: int
    """Number of segments of the peer."""
    heartbeat: Heartbeat | None = None
    """Last heartbeat of this generation; None: no heartbeat of it yet."""


@dataclass
class StallDetector:
    """Progress of all peers of a generation, from their heartbeats."""

    factor: float
    """Deadline as a multiple of the peer's longest time between two actions within a step."""
    floor_seconds: float
    """Minimum deadline, in seconds."""
    startup_seconds: float
    """Deadline in seconds where no duration is measured: the first steps, and work outside a step (loading, saving,
    validation)."""
    longest: dict[tuple[str, int], float] = field(default_factory=dict)
    """Longest time between two actions within a step, in seconds, by peer name and number of segments; kept across
    generations."""
    _generation: int = 0
    _began_at: float = 0.0
    _ended: bool = False
    _members: dict[str, _Member] = field(default_factory=dict)

    def begin(self, generation: int, shares: Mapping[str, int], now: float) -> None:
        """A generation begins. `shares`: number of segments of each peer, by name."""
        self._generation, self._began_at, self._ended = generation, now, False
        self._members = {name: _Member(share) for name, share in shares.items()}

    def end(self) -> None:
        """The generation is over. Stall detection stays on until every member has left the generation."""
        self._ended = True

    def extend_deadlines(self, seconds: float) -> None:
        """Extends the start-up deadline by the seconds in which the hub did not process messages. Other deadlines use
        idle times measured by the peers."""
        self._began_at += seconds

    def on_heartbeat(self, name: str, heartbeat: Heartbeat) -> None:
        """Updates the peer's progress and its longest time between two actions. After the end of the generation, a
        heartbeat from outside it removes the peer."""
        member = self._members.get(name)
        if member is None:
            return
        if heartbeat.generation != self._generation:
            if self._ended:
                del self._members[name]
            return
        last, member.heartbeat = member.heartbeat, heartbeat
        if (
            last is not None
            and heartbeat.n_actions > last.n_actions
            and last.in_step
            and last.steps
            and not last.waits_for
        ):
            key = name, member.share
            self.longest[key] = max(self.longest.get(key, 0.0), last.idle_s)
        elif heartbeat.steps >= _MIN_MEASURED_STEPS:
            self.longest.setdefault((name, member.share), 0.0)  # all actions were shorter than a heartbeat interval

    def drop_peer(self, name: str) -> None:
        self._members.pop(name, None)

    def stalled(self, now: float) -> list[Stall]:
        """Peers past their deadline, including those that were assigned to the generation and have not begun."""
        found = []
        for name, member in self._members.items():
            heartbeat, deadline = member.heartbeat, self._deadline(name, member)
            quiet = now - self._began_at if heartbeat is None else heartbeat.idle_s
            if quiet > deadline and not (heartbeat is not None and heartbeat.waits_for):
                found.append(Stall(name, quiet, deadline))
        return found

    def deadlock_seconds(self) -> float | None:
        """Seconds for which all peers have been waiting for each other, if longer than `startup_seconds`; otherwise
        None."""
        if self._ended:
            return None
        waits = [
            m.heartbeat.idle_s if m.heartbeat is not None and m.heartbeat.waits_for else 0.0
            for m in self._members.values()
        ]
        shortest = min(waits, default=0.0)
        return shortest if shortest > self.startup_seconds else None

    def _deadline(self, name: str, member: _Member) -> float:
        """Seconds without progress after which this peer is stalled."""
        longest = self.longest.get((name, member.share))
        if member.heartbeat is None or not member.heartbeat.in_step or not member.heartbeat.steps or longest is None:
            return self.startup_seconds
        return min(max(self.floor_seconds, self.factor * longest), max(self.startup_seconds, self.floor_seconds))
