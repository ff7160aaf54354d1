"""Membership of a run: which peers are present, and whether each waits, measures its link or computes.

A generation is a set of peers computing together. It ends as soon as one of its peers is lost, leaves or asks what to
do next; the others then ask too, and the next generation begins once enough peers are present. Newcomers are measured
while a generation runs; a generation with fewer peers than wanted ends at the next commit so that they can take part.

Pure state machine without I/O: time is passed in as `now`, in seconds of a monotonic clock.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from thinpipe.core.errors import UserError
from thinpipe.core.exactness import Exactness
from thinpipe.planning.partition import Machine, Partition
from thinpipe.swarm.hub.incarnations import Incarnations
from thinpipe.swarm.hub.like_devices import like_machines, prefer_like
from thinpipe.swarm.hub.suspensions import Suspensions
from thinpipe.swarm.protocol.machine_report import MachineReport
from thinpipe.swarm.protocol.messages import MAX_UPLOAD_SECONDS, Measure, NextRequest

Partitioner = Callable[[Sequence[Machine], float, float], Partition]
"""Partitions the model over machines, given the hub's uplink and downlink rates in bits per second. Raises UserError
when the model does not fit."""


@dataclass(frozen=True)
class Generation:
    """A set of peers computing together, with the segments of each."""

    number: int
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


Judge = Callable[[str, NextRequest, Sequence[str]], GenerationEnd]
"""Why the generation ended, whose first peer that asks for something to do is this one. Also given the peers that have
announced that they leave."""


@dataclass
class _Peer:
    """State of a peer that is present."""

    incarnation: str
    """Incarnation id of the peer process."""
    number: int
    """Incarnation number: how many processes of this peer the hub has seen, this one included."""
    report: MachineReport | None
    """Measured speed and memory of the machine; None: not measured yet."""
    generation: int = 0
    """Newest generation that the peer has left, or did not take part in: it can only be assigned to a newer one."""
    concurrent: tuple[float, float] | None = None
    """Uplink and downlink rates in bits per second, measured while all peers measured at once."""
    leaving: bool = False
    """True: the peer's user has asked it to leave, which it does after its generation has saved."""
    measuring_concurrently: bool = False
    """True from the start of a concurrent measurement until this peer has reported its rates."""


@dataclass
class Membership:
    """Present peers and the current generation."""

    wanted: int
    """Number of peers for which the first generation waits."""
    partitioner: Partitioner
    hub_bps: tuple[float, float] | None = None
    """Uplink and downlink rates of the hub in bits per second, from the settings or from a concurrent measurement of
    all peers. Once known they do not change."""
    patience_seconds: float = 60.0
    """Seconds that later generations wait for missing peers."""
    exactness: Exactness = field(default_factory=Exactness)
    """Classes of the devices that have computed each segment."""
    exact: bool = False
    """True: only devices of these classes may compute; see `HubOptions.exact`."""
    suspensions: Suspensions = field(default_factory=Suspensions)
    """Peers that do not compute for a while, unless the model does not fit without them."""
    judge: Judge = lambda name, _request, _leaving: GenerationEnd("left", f"{name} asked what to do next", name)
    last_generation: int = 0
    """Number of the newest generation; 0: none yet."""
    current: Generation | None = None
    """The running generation, if any."""
    latest: Generation | None = None
    """The running generation or, between two generations, the one that ended last."""
    _peers: dict[str, _Peer] = field(default_factory=dict)
    _incarnations: Incarnations = field(default_factory=Incarnations)
    _measuring: str | None = None
    """Name of the peer that measures its machine now; only one peer does so at a time."""
    _waiting_since: float | None = None
    """Time of the first `NextRequest` since the last generation ended."""
    _previous: Generation | None = None
    """Value of `latest` before the running generation, for `cancel_start`."""
    problem: str = ""
    """Why no generation can begin with the present peers; empty if one can."""
    _infeasible_for: object = None
    """Machines and hub rates for which partitioning failed: it is not tried again until they change."""

    @property
    def present(self) -> list[str]:
        """Names of the present peers."""
        return list(self._peers)

    @property
    def busy(self) -> bool:
        """True while a generation runs or a peer may still be uploading its part of a checkpoint."""
        return self.current is not None or bool(self._still_uploading)

    def incarnation_of(self, name: str) -> str | None:
        """Incarnation id of the peer's current process; None: the peer is absent."""
        return self._peers[name].incarnation if name in self._peers else None

    def report_of(self, name: str) -> MachineReport | None:
        return self._peers[name].report

    def on_leave_announced(self, name: str) -> None:
        """The peer's user has asked it to leave: the generation will end because of this peer, after it has saved."""
        self._peers[name].leaving = True

    def on_next_request(self, name: str, request: NextRequest, now: float) -> GenerationEnd | None:
        """Handles a peer's request for something to do. Returns why the current generation ended, if this request ends
        it."""
        if self.is_superseded(name, request.incarnation):
            return None
        known = self._peers.get(name)
        over = None
        if known is None or known.incarnation != request.incarnation:
            number = self._incarnations.arrive(name, request.incarnation)
            over = self.drop_peer(name, "restarted", f"{name} was restarted")
            known = self._peers[name] = _Peer(request.incarnation, number, request.report)
        known.report = request.report or known.report  # a delayed request may predate the measurement
        if self._measuring == name and known.report is not None:
            self._measuring = None
        if request.concurrent_bps is not None and known.measuring_concurrently:
            known.concurrent, known.measuring_concurrently = request.concurrent_bps, False
            self._update_hub_rates()
        known.generation = max(known.generation, min(request.left_generation, self.last_generation))
        if self.current is not None and name in self.current.names and known.generation >= self.current.number:
            leaving = [other for other in self.current.names if other in self._peers and self._peers[other].leaving]
            over = over or self.judge(name, request, leaving)
            self._end_generation()
        if self.current is None:  # it has left the last generation, or was not in it
            known.generation = self.last_generation
        if self._waiting_since is None:
            self._waiting_since = now
        return over

    def is_superseded(self, name: str, incarnation: str) -> bool:
        """True if a newer process of this peer has been started."""
        return self._incarnations.is_superseded(name, incarnation)

    def is_current_incarnation(self, name: str, incarnation: str) -> bool:
        """True if the peer is present with this incarnation id."""
        return name in self._peers and self._peers[name].incarnation == incarnation

    def drop_peer(self, name: str, cause: str, reason: str = "") -> GenerationEnd | None:
        """Removes a peer that was lost, was kicked or has left. Returns why the current generation ended, if that ends
        it. `cause`, `reason`: see `core.hub_events.PeerLeft`."""
        self._peers.pop(name, None)
        self._update_hub_rates()
        if self._measuring == name:
            self._measuring = None
        if self.current is None or name not in self.current.names:
            return None
        self._end_generation()
        return GenerationEnd(cause, reason or f"{name}: {cause}", name)

    def on_commit(self) -> GenerationEnd | None:
        """Ends the generation after a commit, when little work is lost, if it has fewer peers than wanted and standbys
        can take part. Returns why the generation ended, or None."""
        generation = self.current
        if generation is None or len(generation.names) >= self.wanted or len(self._machines) <= len(generation.names):
            return None
        try:
            stages = self._make_partition(self._machines).stages
        except UserError:
            return None
        new = [name for name, _ in stages if name not in generation.names]
        if len(stages) <= len(generation.names) or not new:
            return None
        self._end_generation()
        return GenerationEnd("rebalance", f"{' and '.join(new)} can take part now")

    def end(self) -> bool:
        """Ends the current generation without dropping a peer. Returns False if there was none."""
        there_was = self.current is not None
        self._end_generation()
        return there_was

    def _end_generation(self) -> None:
        self.current, self._waiting_since = None, None

    @property
    def _machines(self) -> list[Machine]:
        """Machines of all measured peers that may compute."""
        return self._machines_of([name for name in self._peers if name not in self.suspensions])

    def _machines_of(self, names: Iterable[str]) -> list[Machine]:
        reports = [(name, self._peers[name].report) for name in names]
        machines = [report.machine(name) for name, report in reports if report is not None]
        return like_machines(machines, self.exactness) if self.exact else machines

    def _make_partition(self, machines: Sequence[Machine]) -> Partition:
        def partition(among: Sequence[Machine]) -> Partition:
            return self.partitioner(among, *self.hub_rates)

        return partition(machines) if self.exact else prefer_like(machines, self.exactness, partition)

    def next_for(self, name: str, now: float) -> Generation | Measure | None:
        """What the peer does next: compute in a generation or measure. None: it waits."""
        peer = self._peers.get(name)
        if peer is None:
            return None
        if self.current is not None and name in self.current.names:
            return self._generation_for(name, peer, self.current)
        if peer.measuring_concurrently:  # even if peers arrived since: the measurement waits for this one
            return Measure(concurrent=True)
        if peer.report is None:
            return self._measure_one(name)
        if self.current is not None or not self._can_begin(now):
            return None
        if self.hub_bps is None and len(self._machines) > 1:
            return self._measure_concurrently(peer)
        begun = self._begin()
        return None if begun is None else self._generation_for(name, peer, begun)

    def _generation_for(self, name: str, peer: _Peer, generation: Generation) -> Generation | None:
        """The generation, if the peer takes part in it and has not left it."""
        return generation if name in generation.names and peer.generation < generation.number else None

    def _measure_one(self, name: str) -> Measure | None:
        """Lets peers measure one after the other, also while a generation runs, so that a standby is ready when it is
        needed."""
        if self._measuring is None and not any(p.measuring_concurrently for p in self._peers.values()):
            self._measuring = name
        return Measure(concurrent=False) if self._measuring == name else None

    def cancel_start(self) -> None:
        """Undoes the start of the current generation, before any peer is assigned to it."""
        self.current, self.latest = None, self._previous

    def _measure_concurrently(self, peer: _Peer) -> Measure | None:
        """Starts a measurement by all measured peers at once, unless one is running."""
        if not any(p.measuring_concurrently for p in self._peers.values()):
            for other in self._peers.values():
                other.concurrent, other.measuring_concurrently = None, other.report is not None
        return Measure(concurrent=True) if peer.measuring_concurrently else None

    def _update_hub_rates(self) -> None:
        """Derives the hub's rates once every peer of a concurrent measurement has reported or left. The hub's uplink is
        the sum of the peers' downlink rates, and vice versa."""
        measured = [peer.concurrent for peer in self._peers.values() if peer.concurrent is not None]
        if (
            self.hub_bps is None
            and len(measured) > 1
            and not any(p.measuring_concurrently for p in self._peers.values())
        ):
            self.hub_bps = sum(down for _, down in measured), sum(up for up, _ in measured)

    def _can_begin(self, now: float) -> bool:
        """True if a generation can begin. The first one waits until `wanted` peers are present and measured. A later
        one needs as many as computed before (a standby may have replaced a lost peer), or begins with fewer after
        `patience_seconds`."""
        waited = now - self._waiting_since if self._waiting_since is not None else 0.0
        measured = len(self._machines)
        if self._still_uploading and waited < MAX_UPLOAD_SECONDS:
            return False
        if self.last_generation == 0:
            return measured >= self.wanted and all(peer.report is not None for peer in self._peers.values())
        before = [] if self.latest is None else [name for name in self.latest.names if name not in self.suspensions]
        computed = self.wanted if self.latest is None else len(before)
        return measured >= min(self.wanted, computed) or waited >= self.patience_seconds

    @property
    def _still_uploading(self) -> list[str]:
        """Peers of the generation that ended last which have not asked what to do next: they may still be uploading
        their part of a checkpoint."""
        if self.latest is None:
            return []
        return [
            name
            for name in self.latest.names
            if name in self._peers
            and self._peers[name].number == self.latest.incarnations[name]
            and self._peers[name].generation < self.latest.number
        ]

    def overdue(self, now: float) -> list[str]:
        """Peers that have not left the ended generation within `MAX_UPLOAD_SECONDS`."""
        waited = now - self._waiting_since if self._waiting_since is not None else 0.0
        return self._still_uploading if self.current is None and waited >= MAX_UPLOAD_SECONDS else []

    def _begin(self) -> Generation | None:
        """Partitions the model and begins a generation; None if the model does not fit on the measured machines."""
        everybody = self._machines_of(self._peers)
        if not everybody or self._infeasible_for == (everybody, self.hub_rates):
            return None
        try:
            partition = self._partition_without_suspended()
        except UserError as error:
            exact = "; hub.exact keeps segments on the class of device that computed them" if self.exact else ""
            self.problem, self._infeasible_for = f"{error}{exact}", (everybody, self.hub_rates)
            return None
        self.problem, self._infeasible_for = "", None
        self.last_generation += 1
        incarnations = {name: self._peers[name].number for name, _ in partition.stages}
        self._previous = self.latest
        self.current = self.latest = Generation(self.last_generation, partition, incarnations)
        return self.current

    def _partition_without_suspended(self) -> Partition:
        """Partitions the model over peers that are not suspended. If it does not fit, lifts suspensions until it does,
        first of those whose time is over first; none if it does not fit on all machines."""
        suspended = sorted(self.suspensions.until, key=self.suspensions.until.__getitem__)
        needed = [name for name in suspended if name in self._peers]
        free = [name for name in self._peers if name not in self.suspensions]
        for count in range(len(needed)):
            machines = self._machines_of([*free, *needed[:count]])
            with suppress(UserError):
                partition = self._make_partition(machines) if machines else None
                if partition is not None:
                    needed = needed[:count]
                    break
        else:
            partition = self._make_partition(self._machines_of(self._peers))
        for name in needed:
            self.suspensions.lift(name, "the run cannot do without it")
        return partition

    @property
    def hub_rates(self) -> tuple[float, float]:
        """Uplink and downlink rates of the hub in bits per second; infinite while unknown."""
        return self.hub_bps or (float("inf"), float("inf"))

    @property
    def waits_for(self) -> str:
        """What the next generation waits for, in words. Meaningful only while no generation runs."""
        gone = [] if self.latest is None else [name for name in self.latest.names if name not in self._peers]
        if self.problem:
            return f"waiting for {', '.join(gone)}: {self.problem}" if gone else self.problem
        there = f"{len(self._peers)} of {self.wanted} peers are connected"
        if self.exact and (unlike := self._unlike_peers):
            there += f", of which hub.exact excludes {', '.join(unlike)}: {self._unlike_reason(unlike[0])}"
        if not gone:
            return there
        waits = f"{there}; waiting for {', '.join(gone)}"
        return f"{waits}, for up to {self.patience_seconds:.0f} s, then going on without" if self._peers else waits

    @property
    def _unlike_peers(self) -> list[str]:
        """Measured peers that may compute nothing in a run that has to stay exact."""
        like = {machine.name for machine in self._machines}
        return [name for name, peer in self._peers.items() if peer.report is not None and name not in like]

    def _unlike_reason(self, name: str) -> str:
        report = self.report_of(name)
        if report is not None and not report.processor.device_class:
            return "its device does not repeat its own bits: set debug.deterministic at the hub"
        return "its device does not compute the same bits as those of this run"

    def wait_reason(self, name: str) -> str:
        """Why this peer has to wait, in words."""
        if self.problem:
            return self.waits_for
        if self.exact and name in self._unlike_peers:
            return f"{name} waits: hub.exact is set, and {self._unlike_reason(name)}"
        if name in self.suspensions:
            return f"{name} is suspended for a while: {self.suspensions.reasons[name]}"
        if self.current is not None:
            fewer = ", or after the next commit" if len(self.current.names) < self.wanted else ""
            return f"{name} is a standby: it replaces the next peer that leaves or is lost{fewer}"
        unmeasured = [other for other, peer in self._peers.items() if peer.report is None]
        if unmeasured:
            return f"machines are measured one after the other; not measured yet: {', '.join(unmeasured)}"
        return self.waits_for
