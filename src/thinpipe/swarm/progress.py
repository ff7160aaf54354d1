"""Who stands still although its heart beats: a peer that computes, waits for nobody, and has done nothing for long.

How long is long is measured: some times the longest that this peer has needed for anything in a step. Who waits for
another is not to blame. Pure: told of beats and of the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from thinpipe.transport.nats.progress import Beat

_MEASURED_STEPS = 2
"""The first step of an epoch compiles and is never measured; the next one is, before anybody is judged by it."""


@dataclass(frozen=True)
class Still:
    name: str
    seconds: float
    deadline: float

    @property
    def words(self) -> str:
        return (
            f"{self.name} is lost: its heart beats, but it has computed nothing for {self.seconds:.0f} s "
            f"(deadline {self.deadline:.0f} s)"
        )


@dataclass
class _Member:
    share: int
    beat: Beat | None = None
    """The last of this epoch."""


@dataclass
class Watch:
    factor: float
    """So many times what a peer has needed for anything in a step."""
    floor: float
    """No peer is judged by less, in seconds."""
    start: float
    """What is not measured yet may take so long: the first steps; and what is no step: loading, saving, validating."""
    _epoch: int = 0
    _begun: float = 0.0
    _over: bool = False
    _members: dict[str, _Member] = field(default_factory=dict)
    _longest: dict[tuple[str, int], float] = field(default_factory=dict)
    """By name and number of segments, over all epochs."""

    def begin(self, epoch: int, shares: Mapping[str, int], now: float) -> None:
        self._epoch, self._begun, self._over = epoch, now, False
        self._members = {name: _Member(share) for name, share in shares.items()}

    def end(self) -> None:
        """Who does not come out of it is to blame as before: the others wait for it."""
        self._over = True

    def excuse(self, seconds: float) -> None:
        """We did not listen for so long."""
        self._begun += seconds

    def beat(self, name: str, beat: Beat) -> None:
        member = self._members.get(name)
        if member is None:
            return
        if beat.epoch != self._epoch:
            if self._over:
                del self._members[name]
            return
        last, member.beat = member.beat, beat
        if last is not None and beat.marks > last.marks and last.stepping and last.steps and not last.waits_for:
            key = name, member.share
            self._longest[key] = max(self._longest.get(key, 0.0), last.quiet_s)
        elif beat.steps >= _MEASURED_STEPS:
            self._longest.setdefault((name, member.share), 0.0)  # too short for any beat to fall into it

    def gone(self, name: str) -> None:
        self._members.pop(name, None)

    def still(self, now: float) -> list[Still]:
        """Those to blame. Also who was told to begin, and has not."""
        found = []
        for name, member in self._members.items():
            beat, deadline = member.beat, self._deadline(name, member)
            quiet = now - self._begun if beat is None else beat.quiet_s
            if quiet > deadline and not (beat is not None and beat.waits_for):
                found.append(Still(name, quiet, deadline))
        return found

    def circle(self) -> float | None:
        """All wait for each other, for so many seconds: more than anything may take."""
        if self._over:
            return None
        waits = [m.beat.quiet_s if m.beat is not None and m.beat.waits_for else 0.0 for m in self._members.values()]
        shortest = min(waits, default=0.0)
        return shortest if shortest > self.start else None

    def _deadline(self, name: str, member: _Member) -> float:
        longest = self._longest.get((name, member.share))
        if member.beat is None or not member.beat.stepping or not member.beat.steps or longest is None:
            return self.start
        return min(max(self.floor, self.factor * longest), max(self.start, self.floor))
