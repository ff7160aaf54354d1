"""Begins and ends generations (sets of peers computing together) and detects lost peers.

Combines the pure state machines: membership decides who computes, step reduction serves the all-reduce, heartbeats and
stall detection find lost peers, repair restores lost checkpoint files. Requests arrive through `Hub`, which also
publishes messages. Everything runs on the hub's event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace

import msgspec

from thinpipe.core.event_text import format_event
from thinpipe.core.foreign import sanitize
from thinpipe.core.hub_events import RUN_ENDING_CAUSES, GenerationEnded, HubEvent, PeerJoined, PeerLeft
from thinpipe.swarm.hub.assignments import forecast, start_event
from thinpipe.swarm.hub.membership import Membership
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.repair import Repair
from thinpipe.swarm.hub.replica import Generation, GenerationEnd
from thinpipe.swarm.hub.replica_services import ReplicaServices
from thinpipe.swarm.hub.run_host import RunHost
from thinpipe.swarm.hub.state_files import GenerationFile, LinkFile
from thinpipe.swarm.hub.suspects import Ruling, Suspects
from thinpipe.swarm.hub.suspensions import Suspensions
from thinpipe.swarm.hub.watch import Watch
from thinpipe.swarm.protocol.messages import (
    MAX_UPLOAD_SECONDS,
    NextRequest,
)
from thinpipe.transport.nats.broadcasts import GENERATION_OVER, LOST, GenerationOver, PeerLost
from thinpipe.transport.nats.store_messages import StoreReply

CHECK_INTERVAL_SECONDS = 0.2
"""Seconds between two checks for lost peers, commits and changes of membership."""

_NOT_FOUND = msgspec.msgpack.encode(StoreReply(found=False))

Publish = Callable[[str, bytes], Awaitable[None]]
"""Publishes data on a NATS subject."""
PrintLine = Callable[[str], None]
"""Prints a line of text for the hub's owner."""


class Generations:
    """The running generations, one for each replica, and the state around them.

    `publish` sends a message to peers, `print_line` prints a line for the hub's owner, `members` returns the names of
    all peers of the run, present or absent.
    """

    def __init__(
        self,
        run_host: RunHost,
        settings: HubOptions,
        state_files: tuple[GenerationFile, LinkFile],
        publish: Publish,
        print_line: PrintLine,
        members: Callable[[], Collection[str]],
    ) -> None:
        self.run_host, self.settings, self.members = run_host, settings, members
        self._generation_file, self._link_file = state_files
        self.suspensions = Suspensions()
        self.suspects = Suspects(self.suspensions)
        self.membership = Membership(
            settings.peers,
            run_host.make_partition,
            hub_bps=settings.hub_bps or self._link_file.read(),
            patience_seconds=settings.patience_seconds,
            exactness=run_host.exactness,
            exact=settings.exact,
            suspensions=self.suspensions,
            judge=self._judge,
            last_generation=self._generation_file.read(),
            replicas=settings.replicas,
        )
        self.present = self.membership.present
        self.watch = Watch(settings, replicas=len(self.membership.replicas))
        self.replicas = [ReplicaServices(members, self.suspects, each) for each in self.watch.stall_detectors]
        self.repair = Repair(run_host, settings.patience_seconds, self.record, print_line)
        self.stop_requested, self.stop_reason = False, ""
        """`stop_requested`: no further generation begins. `stop_reason`: why the hub stops, set once no peer is
        busy."""
        self._publish, self._print = publish, print_line
        self.changed = asyncio.Condition()
        """Notified when what a peer does next may have changed."""
        self._committed = run_host.committed
        self._announced: dict[str, str] = {}
        """Last text printed by `print_once`, by topic."""
        self.expelling: set[str] = set()
        """Peers that are being expelled: they can still send requests until the broker has removed their key."""

    @property
    def ended(self) -> str:
        """Why the run or the hub has ended, in words; empty while it goes on."""
        return self.stop_reason or self.run_host.ended

    def is_active(self, peer: str, generation: int | None = None) -> bool:
        """True if the peer takes part in a running generation (with this number, if one is given)."""
        running = self.membership.generation_of(peer)
        return running is not None and generation in (None, running.number)

    def has_first_segment(self, peer: str) -> bool:
        """True if the peer has the first segment in its running generation."""
        running = self.membership.generation_of(peer)
        return running is not None and peer == running.names[0]

    def services_with(self, generation: int) -> ReplicaServices | None:
        """Of the replica whose newest generation has this number."""
        replica = self.membership.replica_with(generation)
        return None if replica is None else self.replicas[replica.index]

    def services_of(self, peer: str) -> ReplicaServices | None:
        """Of the replica in which the peer takes part or took part last; see `Membership.replica_of`."""
        replica = self.membership.replica_of(peer)
        return None if replica is None else self.replicas[replica.index]

    # Requests and heartbeats of peers

    async def serve_store(self, peer: str, data: bytes) -> bytes | None:
        """The rendezvous store, for peers of a running generation. Other peers get "not found" at once instead of
        waiting for peers that will not come."""
        services = self.services_of(peer)
        return _NOT_FOUND if services is None or not self.is_active(peer) else await services.store(peer, data)

    async def serve_reduction(self, peer: str, data: bytes) -> bytes | None:
        """The step reduction of the peer's replica; whoever has none is refused by that of the first."""
        return await (self.services_of(peer) or self.replicas[0]).reductions(peer, data)

    def extend_deadlines(self, seconds: float) -> None:
        """Extends all liveness deadlines by the seconds in which the hub did not process messages (suspended or
        busy)."""
        self.watch.extend_deadlines(seconds)
        self.suspensions.extend(seconds)

    def _judge(self, generation: Generation, name: str, request: NextRequest, leaving: Sequence[str]) -> GenerationEnd:
        services = self.services_with(generation.number)
        assert services is not None
        return services.conduct.end_by_request(name, request, leaving, time.monotonic(), stopping=self.stop_requested)

    async def on_next_request(self, peer: str, request: NextRequest) -> Ruling | None:
        """Handles a peer's request for something to do and the report in it. Returns the peer that is removed for its
        conduct, if one is: it is out of membership, and the caller strikes off its key."""
        if peer not in self.present:
            self.record(PeerJoined(step=self.run_host.committed, peer=peer))
        self.watch.on_request(peer, time.monotonic())
        self.repair.uploaded[peer] = request.uploaded
        incarnation = self.present.incarnation_of(peer)
        over = self.membership.on_next_request(peer, request, time.monotonic())
        if incarnation not in (
            None,
            self.present.incarnation_of(peer),
        ):  # the process was restarted: pending uploads of the old one will not finish
            self.run_host.drop_peer(peer)
            self._record_departure(peer, "restarted", f"{peer} was restarted", over)
            self.record(PeerJoined(step=self.run_host.committed, peer=peer))
            self._judge_departure(over)
        left = self.services_with(request.left_generation)
        if left is not None and not self.stop_requested:
            left.conduct.on_return(peer, request, time.monotonic())
        expulsion = self._carry_out_rulings(over)  # before any await: the next generation may begin meanwhile
        if over is not None:
            await self._finish_generation(over)
        return expulsion

    def _carry_out_rulings(self, over: GenerationEnd | None) -> Ruling | None:
        """What follows from the conduct of peers in the generation that has ended because of `over`. Returns the peer
        that is removed, if one is."""
        expulsion = None
        for ruling in [ruling for services in self.replicas for ruling in services.conduct.pop_rulings()]:
            if ruling.stop:
                self.run_host.stop(ruling.stop)
            if ruling.expelled:
                expulsion, name = ruling, ruling.expelled
                self.expelling.add(name)
                reason = f"{name} was removed, because several peers found its values bad ({ruling.reason})"
                self.membership.drop_peer(name, "accused", reason)
                self._record_departure(name, "accused", reason, over)
        self._record_suspensions()
        return expulsion

    def _judge_departure(self, over: GenerationEnd | None) -> None:
        """A peer is gone or was restarted, which ended its generation if `over` is given."""
        if over is not None and (services := self.services_with(over.generation)) is not None:
            services.conduct.on_departure(over, time.monotonic())

    def _record_suspensions(self) -> None:
        for services in self.replicas:
            for event in services.conduct.pop_events(self.run_host.committed):
                self.record(event)

    async def begin_newest(self) -> None:
        """Begins the newest generation of membership in files, run host, event log and services; all of it or, after an
        exception, nothing. Its number is used up in either case."""
        replica = self.membership.replica_with(self.membership.last_generation)
        assert replica is not None
        generation, services = replica.current, self.replicas[replica.index]
        assert generation is not None
        # What can fail comes first, and there is no await before the end: a peer that asks meanwhile would get the
        # assignment of the previous generation, and a generation that ends would be logged before it starts.
        self._generation_file.write(generation.number)
        if self.settings.hub_bps is None and self.present.hub_bps is not None:
            self._link_file.write(self.present.hub_bps)
        try:
            start = self.run_host.begin(generation, forecast(generation, self.present))
        except Exception:
            self.repair.verify_once_more()
            raise
        committed = self.run_host.committed
        event = start_event(generation, self.present, committed, who_reads=self.run_host.who_reads)
        record = services.conduct.begin(generation, start.step_layout, committed)
        self.record(event)
        services.begin(generation, start, time.monotonic())
        if self.membership.running == [generation]:
            self._committed = committed
        self._record_suspensions()
        await services.reductions.begin(generation.number, generation.names, record)
        await self.notify()

    async def check_liveness(self, now: float) -> None:
        """Declares peers lost whose heartbeats stopped, that stall, or that miss another deadline; ends a deadlocked
        generation."""
        self.suspensions.expire(now)
        self._record_suspensions()
        for replica, services in zip(self.membership.replicas, self.replicas, strict=True):
            offence = services.conduct.offence(now)  # also of a generation that has ended since: it counts all the same
            over = None if offence is None or replica.current is None else self.membership.end(replica.current, offence)
            if over is not None:
                self._carry_out_rulings(over)
                await self._finish_generation(over)
                await self.notify()
        for lost in self.watch.lost(now):
            await self.declare_lost(*lost)
        for name, number in self.membership.overdue(now):
            message = f"it sends heartbeats, but has not left generation {number} within {MAX_UPLOAD_SECONDS:.0f} s"
            await self.declare_lost(name, "unresponsive", message)
        for replica, services in zip(self.membership.replicas, self.replicas, strict=True):
            stuck = services.stall_detector.deadlock_seconds()
            if stuck is not None and replica.current is not None:
                deadlock = GenerationEnd("deadlock", f"all peers waited for each other for {stuck:.0f} s")
                await self._finish_generation(self.membership.end(replica.current, deadlock))
                await self.notify()

    async def declare_lost(self, name: str, cause: str, how: str) -> None:
        """Announces to all peers that this peer is lost, and removes it. `how`: how that was noticed, in words."""
        if name in self.present:
            await self._publish(f"bcast.{LOST}", msgspec.msgpack.encode(PeerLost(peer=name)))
            await self.remove(name, cause, f"{name} was lost ({how})")

    async def admit_standbys(self) -> None:
        """After a new commit, ends a generation that has fewer peers than wanted if standbys can take part: hardly any
        work is lost then."""
        step, before = self.run_host.committed, self._committed
        self._committed = step
        if step > before:
            self.suspects.on_commit(step)
        if step == before or self.stop_requested or self.run_host.ended:
            return
        over = self.membership.on_commit()
        if over is not None:
            await self._finish_generation(over)
            await self.notify()

    async def remove(self, name: str, cause: str, reason: str) -> None:
        """Removes a peer from membership and all liveness checks; ends its generation. `cause`, `reason`: see
        `PeerLeft`."""
        known = name in self.present
        over = self.membership.drop_peer(name, cause, reason)
        self.run_host.drop_peer(name)
        self.watch.drop_peer(name)
        self._judge_departure(over)
        if known:
            self._record_departure(name, cause, reason, over)
        self._carry_out_rulings(over)
        if over is not None:
            await self._finish_generation(over)
        await self.notify()

    def _record_departure(self, name: str, cause: str, reason: str, over: GenerationEnd | None) -> None:
        """Logs `PeerLeft`, and prints it unless `GenerationEnded` is printed with the same reason. Must be called
        before anything is awaited: the next generation may begin meanwhile."""
        event = PeerLeft(step=self.run_host.committed, peer=name, cause=cause, reason=sanitize(reason))
        services = self.services_of(name)
        end = over or (None if services is None else services.last_end)
        if end is not None and end.reason == reason:
            self.run_host.on_event(event)
        else:
            self.record(event)

    async def _finish_generation(self, end: GenerationEnd) -> None:
        """Ends a generation in event log and services, and informs its peers."""
        number = end.generation
        if self.stop_requested and end.cause == "left":
            end = GenerationEnd("stopped", "the hub's owner stopped the run", generation=number)
        elif self.stop_requested and end.cause not in RUN_ENDING_CAUSES:
            end = replace(end, cause="stopped")  # no generation follows
        services = self.services_with(number)  # before an await: the next may begin
        assert services is not None
        services.last_end = end
        end = replace(end, reason=sanitize(end.reason))
        self.repair.require_verification()
        self.record(
            GenerationEnded(
                generation=number,
                step=self.run_host.resume_step,
                cause=end.cause,
                peer=sanitize(end.peer),
                reason=end.reason,
            )
        )
        await services.end(end)
        await self._publish(
            f"bcast.{GENERATION_OVER}", msgspec.msgpack.encode(GenerationOver(generation=number, reason=end.reason))
        )

    def record(self, event: HubEvent) -> None:
        """Writes an event to the log of the run and prints it for the hub's owner."""
        self._print(format_event(event))
        self.run_host.on_event(event)

    def print_once(self, about: str, text: str) -> None:
        """Prints the text unless it is the last one printed about this topic."""
        if text and self._announced.get(about) != text:
            self._announced[about] = text
            self._print(text)

    async def notify(self) -> None:
        """Wakes all long polls."""
        async with self.changed:
            self.changed.notify_all()
