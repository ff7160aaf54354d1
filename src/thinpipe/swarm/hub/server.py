"""The hub server: handles the requests of peers and of its owner, and checks for lost peers in a loop.

The hub is the only authority on membership and assignments. Everything runs on one asyncio event loop.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec
from nats.errors import Error as NatsError

import thinpipe
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import ProtocolError, decode_foreign, sanitize
from thinpipe.swarm.broker.broker import Broker, BrokerError
from thinpipe.swarm.hub.admission import Admission
from thinpipe.swarm.hub.answers import Answers
from thinpipe.swarm.hub.broker_link import BrokerLink
from thinpipe.swarm.hub.disconnects import Disconnects
from thinpipe.swarm.hub.event_validation import validated_event
from thinpipe.swarm.hub.generations import CHECK_INTERVAL_SECONDS, Generations
from thinpipe.swarm.hub.options import HubOptions
from thinpipe.swarm.hub.reachability import Reachability
from thinpipe.swarm.hub.run_host import RunHost
from thinpipe.swarm.hub.services.files import FileReadService, FileWriteService
from thinpipe.swarm.hub.services.serve import NotAllowedError, Service, Services
from thinpipe.swarm.hub.state_files import GenerationFile, LinkFile
from thinpipe.swarm.hub.suspects import Ruling
from thinpipe.swarm.protocol.file_messages import READ_SERVICE, WRITE_SERVICE
from thinpipe.swarm.protocol.messages import (
    AdminAnswer,
    AdminRequest,
    AnnouncementReply,
    CheckpointAnnouncement,
    EventReport,
    LeaveReply,
    LeaveRequest,
    NextRequest,
    Note,
    ReadyReply,
    ReadyRequest,
    Refused,
    TokensRequest,
)
from thinpipe.swarm.protocol.names import HUB
from thinpipe.swarm.protocol.probe import SERVICE as PROBE
from thinpipe.swarm.protocol.probe import probe_service
from thinpipe.swarm.protocol.reduction import SERVICE as REDUCE
from thinpipe.swarm.protocol.signed_files import Occasion, first_unsigned
from thinpipe.swarm.protocol.status import PeerStatus, Status
from thinpipe.transport.nats.activity import Heartbeat
from thinpipe.transport.nats.broadcasts import STOP
from thinpipe.transport.nats.direct_client import DirectClient
from thinpipe.transport.nats.store_messages import SERVICE as STORE

_SUSPENDED_SECONDS = 2.0
"""Seconds between two checks from which the hub's machine counts as having been suspended or overloaded."""
_SHUTDOWN_GRACE_SECONDS = 15.0
"""Seconds after the end of the run in which peers can learn of it before the hub exits."""
_MAX_LINE_CHARACTERS = 5000
"""Maximum length of a line printed for the hub's owner."""
_CANNOT_READ = (
    "the hub cannot read the request of this machine ({}). If its thinpipe has another version of the protocol, "
    f"install the hub's version of thinpipe, {thinpipe.__version__}"
)
"""Refusal of a `NextRequest` that is not valid, with the reason."""

_LOG = logging.getLogger(__name__)


class Hub:
    """The hub of one run. `print_line` prints a line for the hub's owner."""

    def __init__(
        self, broker: Broker, run_host: RunHost, settings: HubOptions, print_line: Callable[[str], None]
    ) -> None:
        self.broker, self.run_host, self.settings, self._print_line = broker, run_host, settings, print_line
        disconnects = Disconnects(broker, self._on_disconnect, self._print)
        self._link = BrokerLink(broker, disconnects, self._on_open, self._print)
        self.reachability = Reachability(settings.public_url, disconnects.addresses_of, self._print)
        state_files = GenerationFile(broker.folder / "generation"), LinkFile(broker.folder / "link.json")
        self.generations = Generations(
            run_host, settings, state_files, self._link.publish, self._print, lambda: broker.peers
        )
        self.membership, self.present = self.generations.membership, self.generations.present
        self._answers = Answers(self.generations)
        self.admission = Admission(
            broker, settings, numerics=run_host.numerics, print_line=self._print, who_reads=run_host.who_reads
        )
        self._stop_reason, self._failed = "", False
        self._file_writes = FileWriteService(run_host.accept, run_host.on_file_saved, run_host.on_save_failed)
        self.services = self._make_services()

    async def run(self, begin: "Callable[[Hub], Awaitable[None]]") -> str:
        """Runs until the run has ended or `stop` was called, and returns why. `begin` is called once peers can be
        answered. Raises ConnectionError if nats-server is gone."""
        await self._link.open()
        try:
            await begin(self)
            return await self._supervise()
        finally:
            await self._link.close()

    def _make_services(self) -> Services:
        services: dict[str, Service] = {
            "heartbeat": self._on_heartbeat,
            "next": self._next,
            "ready": self._ready,
            "leave": self._leave,
            "tokens": self._tokens,
            "checkpoint": self._saved,
            "event": self._event,
            "status": self._status,
            "admin": self._admin,
            "renew": self._renew,
            "reach": self.reachability,
            STORE: self.generations.serve_store,
            REDUCE: self.generations.serve_reduction,
            READ_SERVICE: FileReadService(self.run_host.find),
            WRITE_SERVICE: self._write_file,
            PROBE: probe_service,
        }
        return Services(services, self._print, budgets=self.settings.budgets)

    async def _on_open(self, client: DirectClient) -> None:
        """Subscribes on a new connection to the broker."""
        await self.services.open(client, self._served)
        await self.admission.open(client)

    @property
    def _served(self) -> list[str]:
        return [HUB, *self.broker.peers]

    async def _supervise(self) -> str:
        """Periodic checks: lost peers, standbys to admit, stop requests, messages for the owner. Returns why the run
        has ended."""
        ended_at: float | None = None
        checked_at, generations = time.monotonic(), self.generations
        while True:
            connected = self._link.connected
            if connected:
                await self.services.set_peers(self._served)
                await self.admission.update()
            else:
                await self._link.reconnect()
            now = time.monotonic()
            if now - checked_at > _SUSPENDED_SECONDS or not connected:  # heartbeats are still queued, or lost
                _LOG.warning("no messages were processed for %.1f s: deadlines are extended", now - checked_at)
                generations.extend_deadlines(now - checked_at)
            checked_at = now
            await generations.check_liveness(now)
            await generations.admit_standbys()
            if generations.stop_requested and not self.membership.busy:
                generations.stop_reason = self._stop_reason
            elif generations.stop_requested:  # repeated, for peers that subscribed only now
                await self._link.publish(f"bcast.{STOP}", b"")
            generations.print_once("commits", self.run_host.commit_plan)
            for event in self.run_host.check_commits():
                generations.record(event)
            for alarm in [alarm for services in generations.replicas for alarm in services.conduct.pop_alarms()]:
                self.run_host.on_event(alarm)
            for text in self.run_host.pop_notices():
                self._print(text)
            if generations.ended and ended_at is None:
                ended_at = now
                await generations.notify()
            if ended_at is not None and (not self.present or now - ended_at > _SHUTDOWN_GRACE_SECONDS):
                return generations.ended
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)

    def stop(self, failure: str = "") -> None:
        """Asks the peers to save and to stop; no further generation begins. `failure`: why the run cannot continue, if
        it cannot. Of several calls the first counts."""
        if not self._stop_reason:
            self._stop_reason = failure or "stopped by the hub's owner; run the same command to continue"
            self._failed = bool(failure)
        self.generations.stop_requested = True

    @property
    def succeeded(self) -> bool:
        """True if the run has finished, or was stopped by the hub's owner."""
        return self.run_host.finished or (bool(self.generations.stop_reason) and not self._failed)

    # Request handlers. `peer` is the sender's name, which the broker's permissions guarantee.

    async def _on_heartbeat(self, peer: str, data: bytes) -> None:
        """Heartbeats of absent peers and superseded incarnations are ignored."""
        heartbeat = decode_foreign(data, Heartbeat)
        if self.present.is_current_incarnation(peer, heartbeat.incarnation):
            self.generations.watch.on_heartbeat(peer, heartbeat, time.monotonic())

    async def _on_disconnect(self, peer: str) -> None:
        """A process that ends closes its connections at once; a broken link is noticed by heartbeats instead."""
        await self.generations.declare_lost(peer, "disconnected", "its connection closed")

    async def _next(self, peer: str, data: bytes) -> bytes | None:
        """Handles `NextRequest`: a long poll that returns what the peer does next."""
        if peer not in self.broker.peers:
            return None
        try:
            request = decode_foreign(data, NextRequest)
        except ProtocolError as error:
            return _encode(Refused(text=_CANNOT_READ.format(error)))
        if mismatch := self.admission.numerics_mismatch(request.numerics):
            return _encode(Refused(text=mismatch))
        if peer in self.generations.expelling:
            return None  # `_expel` sends the reason, then removes the key
        if self.present.is_superseded(peer, request.incarnation):
            text = (
                f"{peer} was started again elsewhere, and only the process started last takes part: stop that one first"
            )
            return _encode(Refused(text=text))
        expulsion = await self.generations.on_next_request(peer, request)
        if expulsion is not None:
            await self._expel_for_good(expulsion)
        await self.generations.notify()
        answer = await self._answers.answer(peer)
        if self.present.is_current_incarnation(peer, request.incarnation):
            self.generations.watch.pending_requests.add(peer, answer, time.monotonic())
        return _encode(answer)

    async def _expel_for_good(self, expulsion: Ruling) -> None:
        """Strikes off the key of a peer. If the broker cannot, the hub informs its owner and answers the others."""
        try:
            await self._expel(
                expulsion.expelled,
                f"this machine was removed from the run, because several peers found its values bad "
                f"({expulsion.reason}). Check its memory and processor, then ask the hub's owner for a new invite",
            )
        except (BrokerError, UserError) as error:
            self._print(f"{expulsion.expelled} was removed, but may still be connected: {error}")
        finally:
            self.generations.expelling.discard(expulsion.expelled)

    async def _ready(self, peer: str, data: bytes) -> bytes | None:
        """Compares what the peer has loaded with what the hub has; removes the peer from the generation if it
        differs."""
        request = decode_foreign(data, ReadyRequest)
        if peer not in self.broker.peers:
            return None
        if not self.generations.is_active(peer, request.generation):
            return _encode(ReadyReply(generation_over=True))
        refusal = self.run_host.compare_hashes(request.hashes)
        if refusal:
            await self.generations.remove(peer, "refused", f"{peer} was refused ({refusal})")
        return _encode(ReadyReply(refusal=refusal))

    async def _leave(self, peer: str, data: bytes) -> bytes | None:
        """The peer process ends, now or after its generation has saved; ignored from a superseded incarnation."""
        request = decode_foreign(data, LeaveRequest)
        if self.present.is_current_incarnation(peer, request.incarnation):
            if request.after_saving:
                self.membership.on_leave_announced(peer)
            else:
                await self.generations.remove(peer, "left", f"{peer} left")
        return _encode(LeaveReply())

    async def _tokens(self, peer: str, data: bytes) -> bytes | None:
        """Token ids of a batch, for the peer with the first segment alone; empty if the peer's generation is over."""
        request = decode_foreign(data, TokensRequest)
        if peer not in self.broker.peers:
            return None
        if not self.generations.is_active(peer):
            return b""  # the peer's generation is over
        if not self.generations.has_first_segment(peer):
            raise NotAllowedError("batches are for the peer with the first segment alone")
        try:
            return await asyncio.to_thread(self.run_host.tokens, request.split, request.index)
        except IndexError:
            return None

    async def _write_file(self, peer: str, data: bytes) -> bytes | None:
        """Receives a chunk of an upload, which counts as progress of a peer that restores files."""
        self.generations.watch.pending_requests.on_progress(peer, time.monotonic())
        return await self._file_writes(peer, data)

    async def _saved(self, peer: str, data: bytes) -> bytes | None:
        """Handles a checkpoint announcement. Also accepted after the generation is over, until the next begins: the
        saved state is valid."""
        request, public_key = decode_foreign(data, CheckpointAnnouncement), self.broker.peers.get(peer)
        if public_key is None:
            return None
        replica = self.membership.replica_with(request.generation)
        if replica is None or replica.latest is None or peer not in replica.latest.names:
            return _encode(AnnouncementReply(refusal="the checkpoint is not of the current generation"))
        occasion = Occasion(run=self.broker.fingerprint, generation=request.generation, step=request.step)
        unsigned = await asyncio.to_thread(first_unsigned, self.run_host.own_files(peer, request), public_key, occasion)
        if unsigned:
            reason = f"{unsigned} is not signed with the key of {peer}"
            verdict = self.run_host.refuse_announcement(peer, request.generation, reason)
        else:
            verdict = self.run_host.on_checkpoint_announced(peer, request, public_key)
        return _encode(msgspec.structs.replace(verdict, committed=self.run_host.committed))

    async def _event(self, peer: str, data: bytes) -> None:
        """Handles a training event. Also accepted after the generation is over, until the next begins: the event that
        says why the run stops may arrive late on a slow link."""
        report = decode_foreign(data, EventReport)
        replica = self.membership.replica_with(report.generation)
        if replica is None or replica.latest is None or peer != replica.latest.names[0]:
            return
        conduct = self.generations.replicas[replica.index].conduct
        true, wrong = conduct.compared(peer, validated_event(report.event))
        self.generations.print_once(f"events of {peer}", wrong)
        if true is not None:
            self.run_host.on_event(true)

    async def _status(self, _peer: str, _data: bytes) -> bytes | None:
        return _encode(self.status())

    async def _renew(self, peer: str, _data: bytes) -> bytes | None:
        """A new JWT for the peer's key, also for one whose JWT has expired (`broker.authority`)."""
        reply = self.admission.renew(peer)
        return None if reply is None else _encode(reply)

    async def _admin(self, peer: str, data: bytes) -> bytes | None:
        """Commands of the hub's owner: only accepted with the hub's own key."""
        if peer != HUB:
            return None
        request = decode_foreign(data, AdminRequest)
        if request.what == "list":
            return _encode(AdminAnswer(lines=self.admission.open_invites()))
        try:
            return _encode(AdminAnswer(text=await self._execute(request)))
        except (UserError, BrokerError) as error:
            return _encode(AdminAnswer(refusal=str(error)))

    async def _execute(self, request: AdminRequest) -> str:
        if request.what == "invite":
            return (await self.admission.invite()).line()
        if request.what == "revoke":
            return await self.admission.revoke(request.name)
        if request.what == "kick":
            await self.kick(request.name)
            return f"{request.name} was removed; it needs a new invite to join again"
        self.stop()
        return "the peers save a checkpoint, then the run stops"

    async def kick(self, name: str) -> None:
        """Removes a peer at the owner's request. Raises UserError if there is no such peer."""
        if name not in self.broker.peers:
            raise UserError(f"there is no peer {name[:80]!r}; peers: {', '.join(self.broker.peers) or 'none'}")
        reason = f"{name} was removed by the hub's owner"
        if name not in self.present:  # else `remove` prints it
            self._print(reason)
        self.generations.expelling.add(name)
        try:
            await self.generations.remove(name, "kicked", reason)
            notice = "the hub's owner removed this machine from the run: ask for a new invite to join again"
            await self._expel(name, notice)
        finally:
            self.generations.expelling.discard(name)

    async def _expel(self, name: str, notice: str) -> None:
        """Removes a peer, which has left membership, for good. The peer is sent `notice` before its key is removed,
        which cuts its connection. The caller keeps the peer in `expelling` meanwhile, so that no generation begins with
        the peer."""
        await self._link.publish(f"m.{name}.{HUB}.note", _encode(Note(text=notice)))
        try:
            await self._link.flush()
        except (NatsError, ConnectionError) as error:
            _LOG.warning("%s may not have received why it was removed: %s", name, error)
        await asyncio.to_thread(self.broker.remove_peer, name)

    def status(self) -> Status:
        running, waits_for = self.membership.running, self.generations.repair.waits_for or self.membership.waits_for
        shares = {name: share for generation in running for name, share in generation.shares.items()}
        reports = {name: self.present[name].report for name in self.present}
        peers = [PeerStatus(name=name, segments=shares.get(name, 0), report=each) for name, each in reports.items()]
        return Status(
            run=self.settings.run,
            generation=max((generation.number for generation in running), default=0),
            waits_for="" if running else waits_for,
            peers=peers,
            absent=[name for name in self.broker.peers if name not in self.present],
            bottleneck=next((generation.partition.bottleneck for generation in running), ""),
            hub_bps=self.present.hub_bps,
            progress=dict(self.run_host.progress),
            commit_summary=self.run_host.commit_summary,
            who_reads=self.run_host.who_reads,
            reach=self.reachability.text,
            exactness=self.run_host.exactness.in_words(),
            audit=self.run_host.audit_summary,
            alarms=self.run_host.alarms,
            suspended=self.generations.suspensions.in_words(time.monotonic()),
            time_s=self.broker.clock(),
            troubles=self.services.troubles() + self.admission.troubles(),
        )

    def _print(self, text: str) -> None:
        with suppress(OSError):  # a full disk under the console log must not stop the hub
            self._print_line(sanitize(text, _MAX_LINE_CHARACTERS))


def _encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)
