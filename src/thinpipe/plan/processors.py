"""Processors that several processes share, and the clock on which everything happens. For `simulate`.

A host with C cores and more than C processes that compute gives each an equal part of them.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Calls what is due, in the order of time; at one moment, in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, do: Callable[..., object], *given: Any) -> None:
        self._asked += 1
        heappush(self._due, (time, self._asked, do, given))

    def run(self) -> None:
        due = self._due
        while due:
            self.now, _, do, given = heappop(due)
            do(*given)


class Own:
    """A process with a core of its own."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def compute(self, start: float, seconds: float, then: Callable[..., object], *given: Any) -> None:
        """Calls `then` when so much has been computed from `start` on."""
        self.clock.at(start + seconds, then, *given)


class Shared:
    """The cores of a host. All go on equally fast, so it is enough to know what each has had since the start."""

    def __init__(self, clock: Clock, cores: float) -> None:
        self.clock, self.cores = clock, cores
        self._had = self._since = 0.0
        self._running: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._begun = self._alarm = 0

    def compute(self, start: float, seconds: float, then: Callable[..., object], *given: Any) -> None:
        if start > self.clock.now:
            self.clock.at(start, self._begin, seconds, then, given)
        else:
            self._begin(seconds, then, given)

    def _begin(self, seconds: float, then: Callable[..., object], given: tuple[Any, ...]) -> None:
        self._catch_up()
        self._begun += 1
        heappush(self._running, (self._had + seconds, self._begun, then, given))
        self._set_alarm()

    @property
    def _speed(self) -> float:
        return min(1.0, self.cores / max(1, len(self._running)))

    def _catch_up(self) -> None:
        self._had += (self.clock.now - self._since) * self._speed
        self._since = self.clock.now

    def _set_alarm(self) -> None:
        """For the first to finish; what was set before is void."""
        self._alarm += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._had)
            self.clock.at(self.clock.now + left / self._speed, self._finish, self._alarm)

    def _finish(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._catch_up()
        done_at, _, then, given = heappop(self._running)
        self._had = max(self._had, done_at)
        self._set_alarm()
        then(*given)


def processors(clock: Clock, hosts: Sequence[int], cores: Mapping[int, float]) -> list[Own | Shared]:
    """Of each process. Where there is a core for everybody there is nothing to share."""
    shared = {
        host: Shared(clock, cores[host]) for host in set(hosts) if cores.get(host, len(hosts)) < hosts.count(host)
    }
    return [shared.get(host) or Own(clock) for host in hosts]
