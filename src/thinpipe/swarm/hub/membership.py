"""Membership of a run: which peers are present, and whether each waits, measures its link or computes.

A generation is a set of peers computing together, the pipeline of one replica. It ends as soon as one of its peers is
lost, leaves or asks what to do next; the others then ask too, and the next generation begins once enough peers are
present. Newcomers are measured while generations run; a generation with fewer peers than wanted ends at the next commit
so that they can take part. Peers that no replica needs are standbys of all.

Pure state machine without I/O: time is passed in as `now`, in seconds of a monotonic clock.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from thinpipe.core.errors import UserError
from thinpipe.core.exactness import Exactness
from thinpipe.planning.replica_groups import deal
from thinpipe.swarm.hub.candidates import Candidates, Partitioner
from thinpipe.swarm.hub.present_peers import PresentPeers
from thinpipe.swarm.hub.replica import Generation, GenerationEnd, Replica
from thinpipe.swarm.hub.suspensions import Suspensions
from thinpipe.swarm.protocol.messages import MAX_UPLOAD_SECONDS, Measure, NextRequest

Judge = Callable[[Generation, str, NextRequest, Sequence[str]], GenerationEnd]
"""Why a generation ended, whose first peer that asks for something to do is this one. Also given the peers that have
announced that they leave."""


def _left(generation: Generation, name: str, _request: NextRequest, _leaving: Sequence[str]) -> GenerationEnd:
    return GenerationEnd("left", f"{name} asked what to do next", name, generation.number)


class Membership:
    """Present peers and the generations of all replicas.

    `wanted`: number of peers for which the first generations wait. `patience_seconds`: how long later ones wait for
    missing peers. `last_generation`: number of the newest generation so far; 0: none yet. `replicas`: number of
    pipelines that train at the same time. For the rest see `Candidates` and `PresentPeers`.
    """

    def __init__(
        self,
        wanted: int,
        partitioner: Partitioner,
        *,
        hub_bps: tuple[float, float] | None = None,
        patience_seconds: float = 60.0,
        exactness: Exactness | None = None,
        exact: bool = False,
        suspensions: Suspensions | None = None,
        judge: Judge = _left,
        last_generation: int = 0,
        replicas: int = 1,
    ) -> None:
        self.wanted, self.patience_seconds, self.last_generation = wanted, patience_seconds, last_generation
        self.present = PresentPeers(hub_bps)
        self.candidates = Candidates(
            present=self.present,
            partitioner=partitioner,
            exactness=exactness or Exactness(),
            exact=exact,
            suspensions=suspensions or Suspensions(),
        )
        self.replicas = [Replica(index) for index in range(replicas)]
        self._judge = judge

    # Generations

    @property
    def running(self) -> list[Generation]:
        return [replica.current for replica in self.replicas if replica.current is not None]

    @property
    def busy(self) -> bool:
        """True while a generation runs or a peer may still be uploading its part of a checkpoint."""
        return bool(self.running) or any(replica.still_uploading(self.present) for replica in self.replicas)

    def replica_of(self, name: str) -> Replica | None:
        """The replica in whose running generation the peer takes part or, between two generations, took part last."""
        known = [(each.latest.number, each) for each in self.replicas if each.latest and name in each.latest.names]
        return max(known, key=lambda numbered: numbered[0], default=(0, None))[1]

    def generation_of(self, name: str) -> Generation | None:
        """The running generation in which the peer takes part."""
        return next((generation for generation in self.running if name in generation.names), None)

    def replica_with(self, generation: int) -> Replica | None:
        """The replica whose newest generation has this number, whether it runs or has ended."""
        found = (replica for replica in self.replicas if replica.latest and replica.latest.number == generation)
        return next(found, None)

    # Events

    def on_leave_announced(self, name: str) -> None:
        """The peer's user has asked it to leave: the generation will end because of this peer, after it has saved."""
        self.present[name].leaving = True

    def on_next_request(self, name: str, request: NextRequest, now: float) -> GenerationEnd | None:
        """Handles a peer's request for something to do. Returns why its generation ended, if this request ends it."""
        arrival, over = self.present.arrival(name, request), None
        if arrival == "superseded":
            return None
        if arrival == "new":
            over = self.drop_peer(name, "restarted", f"{name} was restarted")
            self.present.arrive(name, request)
        self.present.on_report(name, request)
        peer = self.present[name]
        peer.left = max(peer.left, min(request.left_generation, self.last_generation))
        generation = self.generation_of(name)
        if generation is not None and peer.left >= generation.number:
            leaving = [other for other in generation.names if other in self.present and self.present[other].leaving]
            over = self.end(generation, self._judge(generation, name, request, leaving))
            generation = None
        if generation is None:  # it has left the last one, or was not in it
            peer.left = self.last_generation
        for replica in self.replicas:
            replica.on_request(now)
        return over

    def drop_peer(self, name: str, cause: str, reason: str = "") -> GenerationEnd | None:
        """Removes a peer that was lost, was kicked or has left. Returns why its generation ended, if it was in one.
        `cause`, `reason`: see `core.hub_events.PeerLeft`."""
        self.present.drop(name)
        generation = self.generation_of(name)
        if generation is None:
            return None
        return self.end(generation, GenerationEnd(cause, reason or f"{name}: {cause}", name))

    def on_commit(self) -> GenerationEnd | None:
        """Ends a generation after a commit, when little work is lost, if it has fewer peers than wanted, standbys can
        take part, and no replica waits for them. Returns why it ended, or None."""
        if len(self.running) < len(self.replicas):
            return None
        ends = (self._rebalance(replica, replica.current) for replica in self.replicas if replica.current is not None)
        return next(filter(None, ends), None)

    def _rebalance(self, replica: Replica, generation: Generation) -> GenerationEnd | None:
        machines = self.candidates.machines(self._busy_without(replica))
        if len(generation.names) >= self._wanted_each or len(machines) <= len(generation.names):
            return None
        try:
            stages = self.candidates.partition(machines).stages
        except UserError:
            return None
        new = [name for name, _ in stages if name not in generation.names]
        if len(stages) <= len(generation.names) or not new:
            return None
        return self.end(generation, GenerationEnd("rebalance", f"{' and '.join(new)} can take part now"))

    def end(self, generation: Generation, end: GenerationEnd) -> GenerationEnd:
        """Ends a running generation. Returns `end` with its number."""
        for replica in self.replicas:
            if replica.current is generation:
                replica.end()
        return replace(end, generation=generation.number)

    # What a peer does next

    def next_for(self, name: str, now: float) -> Generation | Measure | None:
        """What the peer does next: compute in a generation or measure. None: it waits."""
        if name not in self.present:
            return None
        peer, generation = self.present[name], self.generation_of(name)
        if generation is not None:
            return generation if peer.left < generation.number else None
        measure = self.present.measure(name)
        if measure is not None or peer.report is None:
            return measure
        for replica in self.replicas:
            if replica.current is None and self._can_begin(replica, now):
                if self.present.hub_bps is None and len(self.candidates.machines()) > 1 and not self.running:
                    return self.present.measure_concurrently(name)
                begun = self._begin(replica, now)
                if begun is not None:
                    return begun if name in begun.names else None
        return None

    def cancel_start(self) -> None:
        """Undoes the start of the newest generation, before any peer is assigned to it."""
        replica = self.replica_with(self.last_generation)
        if replica is not None:
            replica.cancel_start()

    @property
    def _wanted_each(self) -> int:
        """Number of peers for which a replica waits."""
        return max(1, self.wanted // len(self.replicas))

    def _busy_without(self, replica: Replica) -> set[str]:
        """Peers that compute in another replica, or may still be uploading for it."""
        others = [other for other in self.replicas if other is not replica]
        computing = [name for other in others if other.current is not None for name in other.current.names]
        return {*computing, *(name for other in others for name in other.still_uploading(self.present))}

    def _can_begin(self, replica: Replica, now: float) -> bool:
        """True if a generation can begin. The first one waits until `wanted` peers are present and measured. A later
        one needs as many as computed before (a standby may have replaced a lost peer), or begins with fewer after
        `patience_seconds`."""
        waited = replica.waited(now)
        if replica.still_uploading(self.present) and waited < MAX_UPLOAD_SECONDS:
            return False
        if self.last_generation == 0:
            return len(self.candidates.machines()) >= self.wanted and not self.present.unmeasured
        measured = len(self.candidates.machines(self._busy_for(replica, now)))
        latest, wanted, suspended = replica.latest, self._wanted_each, self.candidates.suspensions
        computed = wanted if latest is None else sum(name not in suspended for name in latest.names)
        return measured >= min(wanted, computed) or waited >= self.patience_seconds

    def overdue(self, now: float) -> list[tuple[str, int]]:
        """Peers that have not left an ended generation within `MAX_UPLOAD_SECONDS`, each with its number."""
        waiting = [each for each in self.replicas if each.current is None and each.waited(now) >= MAX_UPLOAD_SECONDS]
        ended = [(replica, replica.latest.number) for replica in waiting if replica.latest is not None]
        return [(name, number) for replica, number in ended for name in replica.still_uploading(self.present)]

    def _begin(self, replica: Replica, now: float) -> Generation | None:
        """Partitions the model and begins a generation; None if the model does not fit on the measured machines that
        the replica may have."""
        busy = self._busy_for(replica, now)
        everybody = self.candidates.all_machines(busy)
        if not everybody or replica.infeasible_for == (everybody, self.present.hub_rates):
            return None
        try:
            partition = self.candidates.partition_without_suspended(busy)
        except UserError as error:
            exact = "; hub.exact keeps segments on the class of device that computed them"
            replica.problem = f"{error}{exact if self.candidates.exact else ''}"
            replica.infeasible_for = everybody, self.present.hub_rates
            return None
        self.last_generation += 1
        incarnations = {name: self.present[name].number for name, _ in partition.stages}
        replica.begin(Generation(self.last_generation, partition, incarnations))
        return replica.current

    def _busy_for(self, replica: Replica, now: float) -> set[str]:
        """Peers that the replica may not have: those of others, and those that are left to others without a generation,
        unless this one has waited for long."""
        busy = self._busy_without(replica)
        if replica.waited(now) >= self.patience_seconds:
            return busy
        waiting = [each for each in self.replicas if each.current is None]
        groups = deal(self.candidates.machines(busy), len(waiting))
        return busy | {
            machine.name
            for each, group in zip(waiting, groups, strict=True)
            if each is not replica
            for machine in group
        }

    # What is waited for, in words

    @property
    def waits_for(self) -> str:
        """What the next generation waits for. Meaningful only while a replica has none."""
        waiting = next((replica for replica in self.replicas if replica.current is None), self.replicas[0])
        gone = [] if waiting.latest is None else [name for name in waiting.latest.names if name not in self.present]
        if waiting.problem:
            return f"waiting for {', '.join(gone)}: {waiting.problem}" if gone else waiting.problem
        there = f"{len(self.present)} of {self.wanted} peers are connected"
        if self.candidates.exact and (unlike := self.candidates.unlike):
            why = self.candidates.unlike_reason(unlike[0])
            there += f", of which hub.exact excludes {', '.join(unlike)}: {why}"
        if not gone:
            return there
        waits = f"{there}; waiting for {', '.join(gone)}"
        return (
            f"{waits}, for up to {self.patience_seconds:.0f} s, then going on without" if len(self.present) else waits
        )

    def wait_reason(self, name: str) -> str:
        """Why this peer has to wait."""
        problem = next((replica.problem for replica in self.replicas if replica.problem), "")
        suspensions, running = self.candidates.suspensions, self.running
        if problem:
            return self.waits_for
        if self.candidates.exact and name in self.candidates.unlike:
            return f"{name} waits: hub.exact is set, and {self.candidates.unlike_reason(name)}"
        if name in suspensions:
            return f"{name} is suspended for a while: {suspensions.reasons[name]}"
        if len(running) == len(self.replicas):
            short = any(len(generation.names) < self._wanted_each for generation in running)
            fewer = ", or after the next commit" if short else ""
            return f"{name} is a standby: it replaces the next peer that leaves or is lost{fewer}"
        if others := self.present.unmeasured:
            return f"machines are measured one after the other; not measured yet: {', '.join(others)}"
        return self.waits_for
