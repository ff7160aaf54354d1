"""Event queue and processors for the simulation of one optimizer step in simulate.py.

A host with C cores on which more than C processes compute gives each process an equal share (processor sharing).
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Event queue: runs callbacks in order of simulated time (seconds), and of scheduling for equal times."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, time: float, do: Callable[..., object], *args: Any) -> None:
        """Schedules `do(*args)` at simulated time `time`, in seconds."""
        self._scheduled += 1
        heappush(self._due, (time, self._scheduled, do, args))

    def run(self) -> None:
        due = self._due
        while due:
            self.now, _, do, args = heappop(due)
            do(*args)


class DedicatedProcessor:
    """Processor of a process that has a core to itself."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def compute(self, start: float, seconds: float, then: Callable[..., object], *args: Any) -> None:
        """Computes for `seconds` from time `start` on, then calls `then`."""
        self.clock.at(start + seconds, then, *args)


class SharedProcessors:
    """Cores of a host shared by several processes.

    All running tasks progress at the same speed, so one counter (`_work_done`, seconds of work per task) is enough.
    """

    def __init__(self, clock: Clock, cores: float) -> None:
        self.clock, self.cores = clock, cores
        self._work_done = self._since = 0.0
        self._running: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._started = self._alarm = 0

    def compute(self, start: float, seconds: float, then: Callable[..., object], *args: Any) -> None:
        if start > self.clock.now:
            self.clock.at(start, self._begin, seconds, then, args)
        else:
            self._begin(seconds, then, args)

    def _begin(self, seconds: float, then: Callable[..., object], args: tuple[Any, ...]) -> None:
        self._catch_up()
        self._started += 1
        heappush(self._running, (self._work_done + seconds, self._started, then, args))
        self._set_alarm()

    @property
    def _speed(self) -> float:
        return min(1.0, self.cores / max(1, len(self._running)))

    def _catch_up(self) -> None:
        self._work_done += (self.clock.now - self._since) * self._speed
        self._since = self.clock.now

    def _set_alarm(self) -> None:
        """Schedules the end of the task that finishes first; earlier alarms become void."""
        self._alarm += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._work_done)
            self.clock.at(self.clock.now + left / self._speed, self._finish, self._alarm)

    def _finish(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._catch_up()
        done_at, _, then, args = heappop(self._running)
        self._work_done = max(self._work_done, done_at)
        self._set_alarm()
        then(*args)


def processors(
    clock: Clock, hosts: Sequence[int], cores: Mapping[int, float]
) -> list[DedicatedProcessor | SharedProcessors]:
    """The processor of each process, in order. `hosts`: host index of each process; `cores`: cores by host index, a
    host without an entry has enough. Processes share cores only on hosts with fewer cores than processes."""
    shared = {
        host: SharedProcessors(clock, cores[host])
        for host in set(hosts)
        if cores.get(host, len(hosts)) < hosts.count(host)
    }
    return [shared.get(host) or DedicatedProcessor(clock) for host in hosts]
