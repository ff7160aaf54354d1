"""Begins and ends generations (sets of peers computing together) and detects lost peers.

Combines the pure state machines: membership decides who computes, step reduction serves the all-reduce, heartbeats and
stall detection find lost peers, repair restores lost checkpoint files. Requests arrive through `Hub`, which also
publishes messages. Everything runs on the hub's event loop.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.event_text import format_event
from thinpipe.core.foreign import sanitize
from thinpipe.core.hub_events import RUN_ENDING_CAUSES, GenerationEnded, HubEvent, PeerJoined, PeerLeft
from thinpipe.swarm.hub.assignments import forecast, make_assignment, measuring_text, start_event
from thinpipe.swarm.hub.conduct import Conduct
from thinpipe.swarm.hub.membership import GenerationEnd, Membership
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.repair import Repair
from thinpipe.swarm.hub.run_host import GenerationStart, RunHost
from thinpipe.swarm.hub.services.reduction import ReductionService
from thinpipe.swarm.hub.services.store import StoreService
from thinpipe.swarm.hub.state_files import GenerationFile, LinkFile
from thinpipe.swarm.hub.suspects import Ruling
from thinpipe.swarm.hub.watch import Watch
from thinpipe.swarm.protocol.messages import (
    MAX_UPLOAD_SECONDS,
    Answer,
    Finished,
    Measure,
    NextRequest,
    RestoreFiles,
    Standby,
)
from thinpipe.transport.nats.broadcasts import GENERATION_OVER, LOST, GenerationOver, PeerLost
from thinpipe.transport.nats.store_messages import StoreReply

LONG_POLL_SECONDS = 10.0
"""Seconds after which a peer's `NextRequest` is answered with `Standby` if there is nothing else to do."""
CHECK_INTERVAL_SECONDS = 0.2
"""Seconds between two checks for lost peers, commits and changes of membership."""
_RESTART_SECONDS = 1.0
"""Seconds between two attempts to begin a generation, if the first failed."""

_LOG = logging.getLogger(__name__)
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
        self.conduct = Conduct(members)
        self.membership = Membership(
            wanted=settings.peers,
            partitioner=run_host.make_partition,
            hub_bps=settings.hub_bps or self._link_file.read(),
            patience_seconds=settings.patience_seconds,
            exactness=run_host.exactness,
            exact=settings.exact,
            suspensions=self.conduct.suspensions,
            judge=self._judge,
            last_generation=self._generation_file.read(),
        )
        self.watch = Watch(settings)
        self.reductions, self.store = ReductionService(), StoreService()
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
        self._trouble, self._next_start_at = "", 0.0
        """Why the last start of a generation failed, and the time before which none is tried."""
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

    def has_first_segment(self, peer: str) -> bool:
        """True if the peer has the first segment in the running generation."""
        current = self.membership.current
        return current is not None and peer == current.names[0]

    # Requests and heartbeats of peers

    async def serve_store(self, peer: str, data: bytes) -> bytes | None:
        """The rendezvous store, for peers of the running generation. Other peers get "not found" at once instead of
        waiting for peers that will not come."""
        return await self.store(peer, data) if self.is_active(peer) else _NOT_FOUND

    def extend_deadlines(self, seconds: float) -> None:
        """Extends all liveness deadlines by the seconds in which the hub did not process messages (suspended or
        busy)."""
        self.watch.extend_deadlines(seconds)
        self.conduct.suspensions.extend(seconds)

    def _judge(self, name: str, request: NextRequest, leaving: Sequence[str]) -> GenerationEnd:
        return self.conduct.end_by_request(name, request, leaving, time.monotonic(), stopping=self.stop_requested)

    async def on_next_request(self, peer: str, request: NextRequest) -> Ruling | None:
        """Handles a peer's request for something to do and the report in it. Returns the peer that is removed for its
        conduct, if one is: it is out of membership, and the caller strikes off its key."""
        if peer not in self.membership.present:
            self.record(PeerJoined(step=self.run_host.committed, peer=peer))
        self.watch.on_request(peer, time.monotonic())
        self.repair.uploaded[peer] = request.uploaded
        incarnation = self.membership.incarnation_of(peer)
        over = self.membership.on_next_request(peer, request, time.monotonic())
        if incarnation not in (
            None,
            self.membership.incarnation_of(peer),
        ):  # the process was restarted: pending uploads of the old one will not finish
            self.run_host.drop_peer(peer)
            self._record_departure(peer, "restarted", f"{peer} was restarted", over)
            self.record(PeerJoined(step=self.run_host.committed, peer=peer))
            self.conduct.on_departure(over, time.monotonic())
        if not self.stop_requested:
            self.conduct.on_return(peer, request, time.monotonic())
        expulsion = self._carry_out_rulings(over)  # before any await: the next generation may begin meanwhile
        if over is not None:
            await self._finish_generation(over)
        return expulsion

    def _carry_out_rulings(self, over: GenerationEnd | None) -> Ruling | None:
        """What follows from the conduct of peers in the generation that has ended because of `over`. Returns the peer
        that is removed, if one is."""
        expulsion = None
        for ruling in self.conduct.pop_rulings():
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

    def _record_suspensions(self) -> None:
        for event in self.conduct.pop_events(self.run_host.committed):
            self.record(event)

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
        if self.membership.current is None and time.monotonic() < self._next_start_at:
            return Standby(text=self._trouble)
        before = self.membership.last_generation
        over = self.stop_requested or bool(self.ended)  # the run may have ended during verification
        try:
            found = None if over else self.membership.next_for(peer, time.monotonic())
            if self.membership.last_generation != before:
                await self._begin_generation()
        except Exception as error:  # of whatever kind: the hub must be able to begin another one
            if self.membership.last_generation != before:
                self.membership.cancel_start()
            return self._start_failed(peer, error)
        if isinstance(found, Measure):
            self.print_once("measuring", measuring_text(peer, found, self.membership))
            return found if found.concurrent else self.run_host.measure
        if found is not None:
            plan, steps = self.run_host.commit_plan, self.conduct.suspects.diverged_steps
            return make_assignment(found, self._generation_start, commit_plan=plan, diverged_steps=steps)
        if self.membership.current is None and not over:
            self.print_once("waits", self.membership.waits_for)
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

    def _start_failed(self, peer: str, error: Exception) -> Standby:
        """Tells the owner why no generation could begin, and waits a little before the next attempt."""
        if isinstance(error, OSError | UserError):
            reason = error.strerror or error if isinstance(error, OSError) else error
            trouble = f"the hub cannot start a generation ({reason}): its owner has to fix this"
        else:
            _LOG.error("no generation could begin when %s asked on hub.%s.next", peer, peer, exc_info=error)
            trouble = (
                f"the hub cannot start a generation, because of an error in it when {peer} asked ({error!r}): it tries "
                "again; hub/hub.log says where, and `thinpipe status` what the peers report of their machines"
            )
        self._trouble, self._next_start_at = sanitize(trouble, 2000), time.monotonic() + _RESTART_SECONDS
        self.print_once("trouble", self._trouble)
        return Standby(text=self._trouble)

    async def _begin_generation(self) -> None:
        """Begins a generation in files, run host, event log and services; all of it or, after an exception, nothing.
        Its number is used up in either case."""
        generation = self.membership.current
        assert generation is not None
        # What can fail comes first, and there is no await before the end: a peer that asks meanwhile would get the
        # assignment of the previous generation, and a generation that ends would be logged before it starts.
        self._generation_file.write(generation.number)
        if self.settings.hub_bps is None and self.membership.hub_bps is not None:
            self._link_file.write(self.membership.hub_bps)
        try:
            start = self.run_host.begin(generation, forecast(generation, self.membership))
        except Exception:
            self.repair.verify_once_more()
            raise
        committed = self.run_host.committed
        event, record = (
            start_event(generation, self.membership, committed, who_reads=self.run_host.who_reads),
            self.conduct.begin(generation, start.step_layout, committed),
        )
        self.record(event)
        self._generation_start, self._committed, self._last_end = start, committed, None
        self.store.clear()
        self.watch.stall_detector.begin(generation.number, generation.shares, time.monotonic())
        self._record_suspensions()
        await self.reductions.begin(generation.number, generation.names, record)
        await self.notify()

    async def check_liveness(self, now: float) -> None:
        """Declares peers lost whose heartbeats stopped, that stall, or that miss another deadline; ends a deadlocked
        generation."""
        self.conduct.suspensions.expire(now)
        self._record_suspensions()
        offence = self.conduct.offence(now)
        if offence is not None and self.membership.end():
            self._carry_out_rulings(offence)
            await self._finish_generation(offence)
            await self.notify()
        for lost in self.watch.lost(now):
            await self.declare_lost(*lost)
        for name in self.membership.overdue(now):
            message = (
                f"it sends heartbeats, but has not left generation {self.membership.last_generation} within "
                f"{MAX_UPLOAD_SECONDS:.0f} s"
            )
            await self.declare_lost(name, "unresponsive", message)
        stuck = self.watch.stall_detector.deadlock_seconds()
        if stuck is not None and self.membership.end():
            reason = f"all peers waited for each other for {stuck:.0f} s"
            await self._finish_generation(GenerationEnd("deadlock", reason))
            await self.notify()

    async def declare_lost(self, name: str, cause: str, how: str) -> None:
        """Announces to all peers that this peer is lost, and removes it. `how`: how that was noticed, in words."""
        if name in self.membership.present:
            await self._publish(f"bcast.{LOST}", msgspec.msgpack.encode(PeerLost(peer=name)))
            await self.remove(name, cause, f"{name} was lost ({how})")

    async def admit_standbys(self) -> None:
        """After a new commit, ends a generation that has fewer peers than wanted if standbys can take part: hardly any
        work is lost then."""
        step, before = self.run_host.committed, self._committed
        self._committed = step
        if step > before:
            self.conduct.suspects.on_commit(step)
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
        self.watch.drop_peer(name)
        self.conduct.on_departure(over, time.monotonic())
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
        self.watch.stall_detector.end()
        await self.reductions.end(reason)
        await self.store.wake_all_waiters()
        await self._publish(
            f"bcast.{GENERATION_OVER}", msgspec.msgpack.encode(GenerationOver(generation=number, reason=reason))
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
        async with self._changed:
            self._changed.notify_all()
