"""The hub of a run: answers what peers ask, and is the only one to say who belongs and who computes what."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

import msgspec
from nats.errors import Error as NatsError

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker import Broker, BrokerError
from thinpipe.swarm.broker_config import HUB
from thinpipe.swarm.departures import Departures
from thinpipe.swarm.epochs import LOOK_SECONDS, Epochs, HubSettings
from thinpipe.swarm.file_requests import FILE, KEEP
from thinpipe.swarm.file_service import FileService, KeepService
from thinpipe.swarm.gate import Gate
from thinpipe.swarm.hosted import Hosted
from thinpipe.swarm.hub_memory import EpochFile, LineFile
from thinpipe.swarm.line_test import SERVICE as LINE
from thinpipe.swarm.line_test import line_service
from thinpipe.swarm.messages import (
    Accusation,
    AdminAnswer,
    AdminRequest,
    EventTold,
    LeaveRequest,
    NextRequest,
    Ready,
    Refused,
    SavedRequest,
    TokensRequest,
    Verdict,
)
from thinpipe.swarm.reading import read, say
from thinpipe.swarm.services import Service, serve
from thinpipe.swarm.status import PeerStatus, Status
from thinpipe.swarm.told_events import read_told
from thinpipe.swarm.vote_service import SERVICE as VOTE
from thinpipe.transport.nats.dial import connect
from thinpipe.transport.nats.progress import BEATS
from thinpipe.transport.nats.requests import SERVICE as STORE

_LATE_SECONDS = 2.0
_FAREWELL_SECONDS = 15.0
"""For peers to hear that the run has ended."""
_MOST_LINE = 5000

Request = TypeVar("Request", bound=msgspec.Struct)


class Hub:
    """`tell` is given lines for the person who runs it."""

    def __init__(self, broker: Broker, hosted: Hosted, settings: HubSettings, tell: Callable[[str], None]) -> None:
        self.broker, self.hosted, self.settings, self._show = broker, hosted, settings, tell
        memory = EpochFile(broker.folder / "epoch"), LineFile(broker.folder / "line.json")
        self.epochs = Epochs(hosted, settings, memory, self._publish, self._tell, lambda: broker.peers)
        self.roster = self.epochs.roster
        self.gate = Gate(
            broker, run=settings.run, public_url=settings.public_url, numerics=hosted.numerics, tell=self._tell
        )
        self._gone, self._why_stopping = asyncio.Event(), ""
        self._keeping = KeepService(hosted.accept, hosted.kept, hosted.not_kept)

    async def run(self, begin: "Callable[[Hub], Awaitable[None]]") -> str:
        """Until the run has ended, or `stop` is called; returns why. `begin` is called once peers can be answered."""
        self._client = await connect(
            self.broker.url,
            self.broker.fingerprint,
            self.broker.hub_seed,
            inbox=f"_INBOX.{HUB}",
            on_down=lambda _error: self._gone.set(),
        )
        services: dict[str, Service] = {
            "beat": self._beat,
            "next": self._next,
            "ready": self._ready,
            "leave": self._leave,
            "tokens": self._tokens,
            "saved": self._saved,
            "event": self._event,
            "status": self._status,
            "admin": self._admin,
            STORE: self.epochs.meet,
            VOTE: self.epochs.votes,
            FILE: FileService(self.hosted.find),
            KEEP: self._keep,
            LINE: line_service,
        }
        for name, service in services.items():
            await serve(self._client, name, service)
        await self.gate.open(self._client)
        try:
            async with Departures(self.broker, self._disconnected):
                await begin(self)
                return await self._watch()
        finally:
            await self._client.close()

    async def _watch(self) -> str:
        ended_at: float | None = None
        looked, epochs = time.monotonic(), self.epochs
        while not self._gone.is_set():
            now = time.monotonic()
            if now - looked > _LATE_SECONDS:  # this machine slept, or was busy: beats wait to be heard
                epochs.excuse(now - looked)
            looked = now
            await epochs.look(now)
            await epochs.let_in()
            if epochs.stop_wanted and not self.roster.at_work:
                epochs.stopping = self._why_stopping
            elif epochs.stop_wanted:  # again and again, for those who have begun to listen just now
                await self._publish("bcast.stop", b"")
            epochs.tell_if_new("commits", self.hosted.commits)
            for text in self.hosted.news():
                self._tell(text)
            if epochs.ended and ended_at is None:
                ended_at = now
                await epochs.notify()
            if ended_at is not None and (not self.roster.present or now - ended_at > _FAREWELL_SECONDS):
                return epochs.ended
            await asyncio.sleep(LOOK_SECONDS)
        raise ConnectionError(f"nats-server is gone. The end of its log:\n{self.broker.log_tail()}")

    def stop(self, why: str = "stopped by the hub's owner; the same command goes on") -> None:
        """Asks the peers to save and to stop. No epoch begins any more. The first reason counts."""
        self._why_stopping = self._why_stopping or why
        self.epochs.stop_wanted = True

    # What peers ask. `peer` is who asks: the server lets nobody ask as another.

    async def _beat(self, peer: str, data: bytes) -> None:
        beat = read(BEATS, data)
        if beat is not None and self.roster.is_now(peer, beat.life):
            self.epochs.beat(peer, beat)

    async def _disconnected(self, peer: str) -> None:
        """A program that ends leaves no connection. A line that is cut keeps one for a while, without beats."""
        await self.epochs.lost(peer, f"{peer} is lost: its connection is closed")

    async def _next(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, NextRequest)
        if request is None or peer not in self.broker.peers:
            return None
        if other := self.gate.why_other_numbers(request.numerics):
            return _encode(Refused(text=other))
        if peer in self.epochs.barred:
            return None  # it is told why, and then cut off
        if self.roster.is_past(peer, request.life):
            return _encode(Refused(text=f"{peer} was started again after this one, and takes part once"))
        accused = await self.epochs.asked(peer, request)
        if accused is not None:
            await self._expel_accused(accused)
        await self.epochs.notify()
        answer = await self.epochs.answer(peer)
        if self.roster.is_now(peer, request.life):
            self.epochs.errands.told(peer, answer, time.monotonic())
        return _encode(answer)

    async def _expel_accused(self, accused: Accusation) -> None:
        what = f"twice in step {accused.step}: {say(accused.what)}"
        await self._expel(
            accused.name,
            f"the others have removed you from the run, for what you sent was bad {what}. Perhaps memory or "
            "processor are at fault; only the hub's owner can invite you again",
            f"{accused.name} was removed by the others: what it sent was bad {what}",
        )

    async def _ready(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, Ready)
        if request is None or peer not in self.broker.peers:
            return None
        if not self.epochs.works(peer, request.epoch):
            return _encode(Verdict(over=True))
        refusal = self.hosted.compare(request.hashes)
        if refusal:
            await self.epochs.remove(peer, f"{peer} was refused: {refusal}")
        return _encode(Verdict(refusal=refusal))

    async def _leave(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, LeaveRequest)
        if request is None:
            return None
        if self.roster.is_now(peer, request.life):
            await self.epochs.remove(peer, f"{peer} has left")
        return _encode(Verdict())

    async def _tokens(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, TokensRequest)
        if request is None or peer not in self.broker.peers:
            return None
        if not self.epochs.works(peer):
            return b""  # its epoch is over
        try:
            return await asyncio.to_thread(self.hosted.tokens, request.split, request.index)
        except IndexError:
            return None

    async def _keep(self, peer: str, data: bytes) -> bytes | None:
        self.epochs.errands.goes_on(peer, time.monotonic())
        return await self._keeping(peer, data)

    async def _saved(self, peer: str, data: bytes) -> bytes | None:
        """Also after the epoch is over, until the next begins: what was saved is good."""
        request, latest = _decode(data, SavedRequest), self.roster.latest
        if request is None:
            return None
        if latest is None or latest.number != request.epoch or peer not in latest.names:
            return _encode(Verdict(refusal="it is not of this epoch"))
        verdict = self.hosted.saved(peer, latest.number, request.manifest, request.files)
        return _encode(msgspec.structs.replace(verdict, committed=self.hosted.committed))

    async def _event(self, peer: str, data: bytes) -> None:
        """Also after the epoch is over, until the next begins: why the run stops may come by the slowest line."""
        told, latest = _decode(data, EventTold), self.roster.latest
        if told is None or latest is None or (told.epoch, peer) != (latest.number, latest.names[0]):
            return
        event = read_told(told.event)
        if event is not None:
            self.hosted.heard(event)

    async def _status(self, _peer: str, _data: bytes) -> bytes | None:
        return _encode(self.status())

    async def _admin(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, AdminRequest)
        if request is None or peer != HUB:
            return None
        try:
            return _encode(AdminAnswer(text=await self._carry_out(request)))
        except (UserError, BrokerError) as error:
            return _encode(AdminAnswer(refusal=str(error)))

    async def _carry_out(self, request: AdminRequest) -> str:
        if request.what == "invite":
            return (await self.gate.invite()).line()
        if request.what == "kick":
            await self.kick(request.name)
            return f"{request.name} is removed and cannot come back without a new invite"
        self.stop()
        return "the run saves and stops"

    async def kick(self, name: str) -> None:
        if name not in self.broker.peers:
            raise UserError(f"there is no peer {name[:80]!r}; there are: {', '.join(self.broker.peers) or 'none'}")
        await self._expel(
            name, "the hub's owner has removed you from the run", f"{name} was removed by the hub's owner"
        )

    async def _expel(self, name: str, told: str, why: str) -> None:
        """It is told first: from the cut itself it could not know why. No epoch begins with it meanwhile."""
        self.epochs.barred.add(name)
        if name not in self.roster.present:  # else it is told below
            self._tell(why)
        try:
            await self.epochs.remove(name, why)
            await self._publish(f"m.{name}.{HUB}.note", told.encode())
            with suppress(NatsError):  # then it does not hear why
                await self._client.flush(timeout=5)
            await asyncio.to_thread(self.broker.remove_peer, name)
        finally:
            self.epochs.barred.discard(name)

    def status(self) -> Status:
        roster, epoch = self.roster, self.roster.current
        shares = {} if epoch is None else epoch.shares
        peers = [
            PeerStatus(name=name, segments=shares.get(name, 0), report=roster.report_of(name))
            for name in roster.present
        ]
        return Status(
            run=self.settings.run,
            epoch=epoch.number if epoch else 0,
            waits_for="" if epoch else self.epochs.mending.waits_for or roster.waits_for,
            peers=peers,
            away=[name for name in self.broker.peers if name not in roster.present],
            bottleneck=epoch.assignment.bottleneck if epoch else "",
            hub_bps=roster.hub_rates if peers else (0.0, 0.0),
            progress=dict(self.hosted.progress),
            commits=self.hosted.commits,
            time_s=time.time(),
        )

    async def _publish(self, subject: str, data: bytes) -> None:
        if self._client.is_connected:  # else all is over, and they notice
            await self._client.publish(subject, data)

    def _tell(self, text: str) -> None:
        with suppress(OSError):  # a full disk under the log must not keep the hub from its work
            self._show(say(text, _MOST_LINE))


def _encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def _decode(data: bytes, kind: type[Request]) -> Request | None:
    return read(_decoder(kind), data)


@cache
def _decoder(kind: type[Request]) -> "msgspec.msgpack.Decoder[Request]":
    return msgspec.msgpack.Decoder(kind)
