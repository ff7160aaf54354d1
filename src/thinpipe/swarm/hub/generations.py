"""Begins and ends generations (sets of peers computing together) and detects lost peers.

Combines the pure state machines: membership decides who computes, step reduction serves the all-reduce, heartbeats and
stall detection find lost peers, repair restores lost checkpoint files. Requests arrive through `Hub`, which also
publishes messages. Everything runs on the hub's event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import replace

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.event_text import format_event
from thinpipe.core.events import (
    RUN_ENDING_CAUSES,
    GenerationEnded,
    GenerationStarted,
    HubEvent,
    PeerAssignment,
    PeerJoined,
    PeerLeft,
)
from thinpipe.swarm.hub.accusations import Accusations
from thinpipe.swarm.hub.liveness import Heartbeats, PendingRequests
from thinpipe.swarm.hub.membership import Generation, GenerationEnd, Membership
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.repair import Repair
from thinpipe.swarm.hub.run_host import GenerationForecast, GenerationStart, RunHost
from thinpipe.swarm.hub.services.reduction import ReductionService
from thinpipe.swarm.hub.services.store import StoreService
from thinpipe.swarm.hub.stalls import StallDetector
from thinpipe.swarm.hub.state_files import GenerationFile, LinkFile
from thinpipe.swarm.protocol.decoding import sanitize
from thinpipe.swarm.protocol.messages import (
    MAX_UPLOAD_SECONDS,
    Accusation,
    Answer,
    Assignment,
    Finished,
    Measure,
    NextRequest,
    RestoreFiles,
    Standby,
)
from thinpipe.transport.nats.activity import Heartbeat
from thinpipe.transport.nats.store_messages import StoreReply

LONG_POLL_SECONDS = 10.0
"""Seconds after which a peer's `NextRequest` is answered with `Standby` if there is nothing else to do."""
CHECK_INTERVAL_SECONDS = 0.2
"""Seconds between two checks for lost peers, commits and changes of membership."""

_NOT_FOUND = msgspec.msgpack.encode(StoreReply(found=False))

Publish = Callable[[str, bytes], Awaitable[None]]
"""Publishes data on a NATS subject."""
PrintLine = Callable[[str], None]
"""Prints a line of text for the hub's owner."""


class Generations:
    """The running generation and the state around it.

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
        self.membership = Membership(
            wanted=settings.peers,
            partitioner=run_host.make_partition,
            hub_bps=settings.hub_bps or self._link_file.read(),
            patience_seconds=settings.patience_seconds,
            exactness=run_host.exactness,
            exact=settings.exact,
            last_generation=self._generation_file.read(),
        )
        self.heartbeats = Heartbeats(settings.heartbeat_timeout_seconds)
        self.stall_detector = StallDetector(
            factor=settings.stall_factor,
            floor_seconds=settings.stall_floor_seconds,
            startup_seconds=settings.startup_seconds,
        )
        self.pending_requests = PendingRequests(settings.request_timeout_seconds)
        self.reductions, self.store, self.accusations = ReductionService(), StoreService(), Accusations()
        self.repair = Repair(run_host, settings.patience_seconds, self.record, print_line)
        self.stop_requested, self.stop_reason = False, ""
        """`stop_requested`: no further generation begins. `stop_reason`: why the hub stops, set once no peer is
        busy."""
        self._publish, self._print = publish, print_line
        self._changed = asyncio.Condition()
        self._generation_start: GenerationStart
        """Settings and manifests of the current generation."""
        self._committed = run_host.committed
        self._last_end: GenerationEnd | None = None
        """Why the last generation ended; None while a generation runs."""
        self._announced: dict[str, str] = {}
        """Last text printed by `print_once`, by topic."""
        self.expelling: set[str] = set()
        """Peers that are being expelled: they can still send requests until the broker has removed their key."""

    @property
    def ended(self) -> str:
        """Why the run or the hub has ended, in words; empty while it goes on."""
        return self.stop_reason or self.run_host.ended

    def is_active(self, peer: str, generation: int | None = None) -> bool:
        """True if the peer takes part in the running generation (with this number, if one is given)."""
        current = self.membership.current
        return current is not None and peer in current.names and generation in (None, current.number)

    # Requests and heartbeats of peers

    async def serve_store(self, peer: str, data: bytes) -> bytes | None:
        """The rendezvous store, for peers of the running generation. Other peers get "not found" at once instead of
        waiting for peers that will not come."""
        return await self.store(peer, data) if self.is_active(peer) else _NOT_FOUND

    def on_heartbeat(self, peer: str, heartbeat: Heartbeat) -> None:
        self.heartbeats.on_heartbeat(peer, time.monotonic())
        self.stall_detector.on_heartbeat(peer, heartbeat)

    def extend_deadlines(self, seconds: float) -> None:
        """Extends all liveness deadlines by the seconds in which the hub did not process messages (suspended or
        busy)."""
        self.heartbeats.extend_deadlines(seconds)
        self.stall_detector.extend_deadlines(seconds)
        self.pending_requests.extend_deadlines(seconds)

    async def on_next_request(self, peer: str, request: NextRequest) -> Accusation | None:
        """Handles a peer's request for something to do and the report in it. Returns the accusation if a majority now
        accuses a peer: that peer is out of membership, and the caller expels it."""
        if peer not in self.membership.present:
            self.record(PeerJoined(step=self.run_host.committed, peer=peer))
        self.heartbeats.on_heartbeat(peer, time.monotonic())
        self.pending_requests.discard(peer)
        self.repair.uploaded[peer] = request.uploaded
        accused = self._majority_accused(peer, request)
        incarnation = self.membership.incarnation_of(peer)
        over = self.membership.on_next_request(peer, request, time.monotonic())
        if incarnation not in (
            None,
            self.membership.incarnation_of(peer),
        ):  # the process was restarted: pending uploads of the old one will not finish
            self.run_host.drop_peer(peer)
            self._record_departure(peer, "restarted", f"{peer} was restarted", over)
            self.record(PeerJoined(step=self.run_host.committed, peer=peer))
        if accused is not None:  # before any await: the next generation may begin meanwhile
            self.expelling.add(accused.name)
            what = f"bad values twice in step {accused.step}: {sanitize(accused.what)}"
            why = "accused", f"{accused.name} was removed by the other peers ({what})"
            over = self.membership.drop_peer(accused.name, *why) or over
            self._record_departure(accused.name, *why, over)
        if over is not None:
            await self._finish_generation(over)
        return accused

    def _majority_accused(self, peer: str, request: NextRequest) -> Accusation | None:
        """The accusation in this request, if it makes a majority."""
        accused, generation = request.accusation, self.membership.latest
        if accused is None or generation is None or request.left_generation != generation.number:
            return None
        known = accused.name in self.members()
        return accused if known and self.accusations.add(peer, accused, generation.number, generation.names) else None

    async def answer(self, peer: str) -> Answer:
        """Long poll: waits up to `LONG_POLL_SECONDS` for something other than `Standby`, or for a newer checkpoint to
        mirror."""
        deadline, newest = time.monotonic() + LONG_POLL_SECONDS, self.run_host.newest_manifest()
        while True:
            if self.ended:
                return Finished(text=self.ended, will_resume=bool(self.stop_reason))
            answer = await self._answer_now(peer)
            left = deadline - time.monotonic()
            if not isinstance(answer, Standby):
                return answer
            running, copy = self.membership.current is not None, self.run_host.newest_manifest()
            if left <= 0 or (running and copy != newest):
                return Standby(text=answer.text, manifest=copy if running else b"")
            async with self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, CHECK_INTERVAL_SECONDS))

    async def _answer_now(self, peer: str) -> Answer:
        """The reply according to the present state, without waiting for changes."""
        if self.membership.current is None:
            verifying = await self.repair.verification_status(CHECK_INTERVAL_SECONDS)
            if verifying:
                return Standby(text=verifying)
            missing = self._next_repair(peer)
            if missing:
                return missing if isinstance(missing, RestoreFiles) else Standby(text=missing)
        before = self.membership.last_generation
        over = self.stop_requested or bool(self.ended)  # the run may have ended during verification
        found = None if over else self.membership.next_for(peer, time.monotonic())
        if self.membership.last_generation != before:
            try:
                await self._begin_generation()
            except (OSError, UserError) as error:
                self.membership.cancel_start()
                reason = error.strerror or error if isinstance(error, OSError) else error
                trouble = f"the hub cannot start a generation ({reason}): its owner has to fix this"
                self.print_once("trouble", trouble)
                return Standby(text=trouble)
        if isinstance(found, Measure):
            return found if found.concurrent else self.run_host.measure
        if found is not None:
            return self._make_assignment(found)
        if self.membership.problem:
            self.print_once("problem", self.membership.waits_for)
        return Standby(text=self.membership.wait_reason(peer))

    def _next_repair(self, peer: str) -> RestoreFiles | str:
        """While the newest checkpoint is incomplete: what this peer restores, or why all peers wait. Otherwise
        empty."""
        present = self.membership.present
        measured = peer in present and self.membership.report_of(peer) is not None
        if not measured or self.membership.current is not None:
            return ""
        absent = [name for name in self.members() if name not in present]
        if self.membership.busy:  # a newer checkpoint may still be uploading
            return self.run_host.describe_missing(present, absent) if self.run_host.missing else ""
        return self.repair.next_for(peer, time.monotonic(), present, absent)

    async def _begin_generation(self) -> None:
        """Stores the generation number, then starts the generation in run host, services and event log."""
        generation = self.membership.current
        assert generation is not None
        self._generation_file.write(generation.number)
        if self.settings.hub_bps is None and self.membership.hub_bps is not None:
            self._link_file.write(self.membership.hub_bps)
        self.store.clear()
        self._last_end = None
        # No await before this: a peer asking meanwhile would get the previous `_generation_start`.
        try:
            self._generation_start, self._committed = (
                self.run_host.begin(generation, self._forecast(generation)),
                self.run_host.committed,
            )
        except (OSError, UserError):
            self.repair.verify_once_more()
            raise
        self.stall_detector.begin(generation.number, generation.shares, time.monotonic())
        self.record(  # before an await, in which the generation may end: its start is logged before its end
            GenerationStarted(
                generation=generation.number,
                step=self._committed,
                peers=self._peer_places(generation),
                bottleneck=generation.partition.bottleneck,
            )
        )
        await self.reductions.begin(generation.number, generation.names)
        await self.notify()

    def _forecast(self, generation: Generation) -> GenerationForecast:
        reports = [self.membership.report_of(name) for name in generation.names]
        return GenerationForecast(
            tokens_per_second=generation.partition.tokens_per_second,
            up_bps=[report.up_bps for report in reports if report is not None],
            hub_down_bps=self.membership.hub_rates[1],
            latency_s=max(report.latency_s for report in reports if report is not None),
        )

    def _peer_places(self, generation: Generation) -> list[PeerAssignment]:
        reports = [(name, segments, self.membership.report_of(name)) for name, segments in generation.partition.stages]
        return [report.place(name, segments) for name, segments, report in reports if report is not None]

    def _make_assignment(self, generation: Generation) -> Assignment:
        generation_start = self._generation_start
        return Assignment(
            generation=generation.number,
            names=generation.names,
            shares=list(generation.shares.values()),
            incarnations=dict(generation.incarnations),
            settings=generation_start.settings,
            manifest=generation_start.manifest,
            dataset_info=generation_start.dataset_info,
            tokenizer=generation_start.tokenizer,
            text=f"slowest part: {generation.partition.bottleneck}; {self.run_host.commit_summary}",
            upload_bytes_per_second=generation_start.upload_bytes_per_second,
            removal_steps=self.accusations.steps,
        )

    async def check_liveness(self, now: float) -> None:
        """Declares peers lost whose heartbeats stopped, that stall, or that miss another deadline; ends a deadlocked
        generation."""
        for name, seconds in self.heartbeats.newly_timed_out(now):
            await self.declare_lost(name, "no_heartbeat", f"no heartbeat for {seconds:.0f} s")
        for stalled in self.stall_detector.stalled(now):
            await self.declare_lost(stalled.name, "stalled", stalled.message)
        for name, message in self.pending_requests.overdue(now):
            await self.declare_lost(name, "unresponsive", message)
        for name in self.membership.overdue(now):
            message = (
                f"it sends heartbeats, but has not left generation {self.membership.last_generation} within "
                f"{MAX_UPLOAD_SECONDS:.0f} s"
            )
            await self.declare_lost(name, "unresponsive", message)
        stuck = self.stall_detector.deadlock_seconds()
        if stuck is not None and self.membership.end():
            reason = f"all peers waited for each other for {stuck:.0f} s"
            await self._finish_generation(GenerationEnd("deadlock", reason))
            await self.notify()

    async def declare_lost(self, name: str, cause: str, how: str) -> None:
        """Announces to all peers that this peer is lost, and removes it. `how`: how that was noticed, in words."""
        if name in self.membership.present:
            await self._publish("bcast.lost", name.encode())
            await self.remove(name, cause, f"{name} was lost ({how})")

    async def admit_standbys(self) -> None:
        """After a new commit, ends a generation that has fewer peers than wanted if standbys can take part: hardly any
        work is lost then."""
        step, before = self.run_host.committed, self._committed
        self._committed = step
        if step == before or self.stop_requested or self.run_host.ended:
            return
        over = self.membership.on_commit()
        if over is not None:
            await self._finish_generation(over)
            await self.notify()

    async def remove(self, name: str, cause: str, reason: str) -> None:
        """Removes a peer from membership and all liveness checks; ends its generation. `cause`, `reason`: see
        `PeerLeft`."""
        known = name in self.membership.present
        over = self.membership.drop_peer(name, cause, reason)
        self.run_host.drop_peer(name)
        self.stall_detector.drop_peer(name)
        self.pending_requests.discard(name)
        if known:
            self._record_departure(name, cause, reason, over)
        if over is not None:
            await self._finish_generation(over)
        await self.notify()

    def _record_departure(self, name: str, cause: str, reason: str, over: GenerationEnd | None) -> None:
        """Logs `PeerLeft`, and prints it unless `GenerationEnded` is printed with the same reason. Must be called
        before anything is awaited: the next generation may begin meanwhile."""
        event = PeerLeft(step=self.run_host.committed, peer=name, cause=cause, reason=sanitize(reason))
        end = over or self._last_end
        if end is not None and end.reason == reason:
            self.run_host.on_event(event)
        else:
            self.record(event)

    async def _finish_generation(self, end: GenerationEnd) -> None:
        """Ends the current generation in event log and services, and informs its peers."""
        if self.stop_requested and end.cause == "left":
            end = GenerationEnd("stopped", "the hub's owner stopped the run")
        elif self.stop_requested and end.cause not in RUN_ENDING_CAUSES:
            end = replace(end, cause="stopped")  # no generation follows
        number, reason = self.membership.last_generation, sanitize(end.reason)  # before an await: the next may begin
        self._last_end = end
        self.repair.require_verification()
        self.record(
            GenerationEnded(
                generation=number,
                step=self.run_host.resume_step,
                cause=end.cause,
                peer=sanitize(end.peer),
                reason=reason,
            )
        )
        self.stall_detector.end()
        await self.reductions.end(reason)
        await self.store.wake_all_waiters()
        await self._publish("bcast.generation_over", f"{number} {reason}".encode())

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
        async with self._changed:
            self._changed.notify_all()
