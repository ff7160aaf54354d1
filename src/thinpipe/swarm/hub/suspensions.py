"""Peers that take no part in generations for a while. Pure: `now` is in seconds of a monotonic clock."""

from collections import Counter

from thinpipe.core.units import format_duration_ceil

FIRST_SECONDS = 300.0
"""Seconds of a peer's first suspension; each further one is twice as long, up to `LONGEST_SECONDS`."""
LONGEST_SECONDS = 4 * 3600.0


class Suspensions:
    """Suspended peers, by name. A peer whose suspension is over computes again from the next commit or generation."""

    def __init__(self) -> None:
        self.until: dict[str, float] = {}
        """When the suspension of each suspended peer ends."""
        self.reasons: dict[str, str] = {}
        """Why each of them is suspended, in words."""
        self.counts: Counter[str] = Counter()
        """How often each peer was suspended."""
        self._ended: list[tuple[str, str]] = []

    def __contains__(self, name: str) -> bool:
        return name in self.until

    def suspend(self, name: str, reason: str, now: float) -> float:
        """Returns the seconds for which the peer is suspended."""
        seconds = min(FIRST_SECONDS * 2.0 ** self.counts[name], LONGEST_SECONDS)
        self.counts[name] += 1
        self.until[name], self.reasons[name] = now + seconds, reason
        return seconds

    def lift(self, name: str, why: str) -> None:
        """Ends a suspension before its time."""
        if self.until.pop(name, None) is not None:
            del self.reasons[name]
            self._ended.append((name, why))

    def forget(self, name: str) -> None:
        """The peer is no longer a member."""
        self.until.pop(name, None)
        self.reasons.pop(name, None)

    def expire(self, now: float) -> None:
        for name in [name for name, until in self.until.items() if until <= now]:
            self.lift(name, "its time is over")

    def extend(self, seconds: float) -> None:
        """The hub stood still for so long."""
        self.until = {name: until + seconds for name, until in self.until.items()}

    def in_words(self, now: float) -> dict[str, str]:
        """How long each suspension will last, and why, by name of the peer."""
        return {
            name: f"for another {format_duration_ceil(max(0.0, until - now))}: {self.reasons[name]}"
            for name, until in self.until.items()
        }

    def pop_ended(self) -> list[tuple[str, str]]:
        """Peers whose suspension has ended since the last call, each with the reason."""
        ended, self._ended = self._ended, []
        return ended
