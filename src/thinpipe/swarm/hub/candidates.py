"""Machines that may compute now, and partitions of the model over them.

Suspended peers may not, unless the model does not fit without them; with `hub.exact` neither may devices of a class
other than the one that has computed a segment. Pure.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from thinpipe.core.errors import UserError
from thinpipe.core.exactness import Exactness
from thinpipe.planning.partition import Machine, Partition
from thinpipe.swarm.hub.like_devices import like_machines, prefer_like
from thinpipe.swarm.hub.present_peers import PresentPeers
from thinpipe.swarm.hub.suspensions import Suspensions

Partitioner = Callable[[Sequence[Machine], float, float], Partition]
"""Partitions the model over machines, given the hub's uplink and downlink rates in bits per second. Raises UserError
when the model does not fit."""


@dataclass(kw_only=True)
class Candidates:
    """Measured peers among those present, without those that may not compute."""

    present: PresentPeers
    partitioner: Partitioner
    exactness: Exactness = field(default_factory=Exactness)
    """Classes of the devices that have computed each segment."""
    exact: bool = False
    """True: only devices of these classes may compute; see `HubOptions.exact`."""
    suspensions: Suspensions = field(default_factory=Suspensions)
    """Peers that do not compute for a while, unless the model does not fit without them."""

    def machines(self, busy: Collection[str] = ()) -> list[Machine]:
        """Machines of all measured peers that may compute. `busy`: peers that compute elsewhere."""
        return self._machines_of([name for name in self.present if name not in self.suspensions and name not in busy])

    def all_machines(self, busy: Collection[str] = ()) -> list[Machine]:
        """With those of suspended peers, which may have to compute."""
        return self._machines_of([name for name in self.present if name not in busy])

    def _machines_of(self, names: Iterable[str]) -> list[Machine]:
        reports = [(name, self.present[name].report) for name in names]
        machines = [report.machine(name) for name, report in reports if report is not None]
        return like_machines(machines, self.exactness) if self.exact else machines

    def partition(self, machines: Sequence[Machine]) -> Partition:
        """Raises UserError if the model does not fit."""

        def partition(among: Sequence[Machine]) -> Partition:
            return self.partitioner(among, *self.present.hub_rates)

        return partition(machines) if self.exact else prefer_like(machines, self.exactness, partition)

    def partition_without_suspended(self, busy: Collection[str] = ()) -> Partition:
        """Partitions the model over peers that are not suspended. If it does not fit, lifts suspensions until it does,
        first of those whose time is over first; none, and UserError, if it does not fit on all machines."""
        suspended = sorted(self.suspensions.until, key=self.suspensions.until.__getitem__)
        needed = [name for name in suspended if name in self.present and name not in busy]
        free = [name for name in self.present if name not in self.suspensions and name not in busy]
        for count in range(len(needed)):
            machines = self._machines_of([*free, *needed[:count]])
            with suppress(UserError):
                partition = self.partition(machines) if machines else None
                if partition is not None:
                    needed = needed[:count]
                    break
        else:
            partition = self.partition(self.all_machines(busy))
        for name in needed:
            self.suspensions.lift(name, "the run cannot do without it")
        return partition

    @property
    def unlike(self) -> list[str]:
        """Measured peers that may compute nothing in a run that has to stay exact."""
        like = {machine.name for machine in self.machines()}
        return [name for name in self.present if self.present[name].report is not None and name not in like]

    def unlike_reason(self, name: str) -> str:
        """Why one of them may not, in words."""
        report = self.present[name].report
        if report is not None and not report.processor.device_class:
            return "its device does not repeat its own bits: set debug.deterministic at the hub"
        return "its device does not compute the same bits as those of this run"
