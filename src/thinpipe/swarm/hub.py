"""The hub of a run: answers what peers ask, and is the only one to say who belongs and who computes what."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.events import AnyEvent
from thinpipe.core.files import write_atomically
from thinpipe.swarm.accusations import Accusations
from thinpipe.swarm.broker import Broker, BrokerError
from thinpipe.swarm.broker_config import HUB
from thinpipe.swarm.file_requests import FILE, KEEP
from thinpipe.swarm.file_service import FileService, KeepService
from thinpipe.swarm.gate import Gate
from thinpipe.swarm.hearts import LOST_AFTER_SECONDS, Hearts
from thinpipe.swarm.hosted import Beginning, Hosted
from thinpipe.swarm.line_test import SERVICE as LINE
from thinpipe.swarm.line_test import line_service
from thinpipe.swarm.messages import (
    AdminAnswer,
    AdminRequest,
    Answer,
    Done,
    Measure,
    NextRequest,
    Ready,
    Refused,
    SavedRequest,
    TokensRequest,
    Verdict,
    Wait,
    Work,
)
from thinpipe.swarm.reading import read, say
from thinpipe.swarm.roster import Epoch, Roster
from thinpipe.swarm.services import Service, serve
from thinpipe.swarm.status import PeerStatus, Status
from thinpipe.swarm.store_service import StoreService
from thinpipe.swarm.vote_service import SERVICE as VOTE
from thinpipe.swarm.vote_service import VoteService
from thinpipe.transport.nats.dial import connect
from thinpipe.transport.nats.requests import SERVICE as STORE

ANSWER_SECONDS = 10.0
"""A peer that asks what to do is answered after so long, if only that it has to wait."""
_LOOK_SECONDS, _LATE_SECONDS = 0.2, 2.0
_FAREWELL_SECONDS = 15.0
"""For peers to hear that the run has ended."""
_MOST_EVENT_NBYTES, _MOST_LINE = 256 << 10, 5000
_EVENTS: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)

Request = TypeVar("Request", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class HubSettings:
    run: str
    """What the run is called."""
    public_url: str
    """The address in invites."""
    peers: int
    """For which the first epoch waits."""
    hub_bps: tuple[float, float] | None = None
    patience_seconds: float = 60.0
    lost_after_seconds: float = LOST_AFTER_SECONDS


class Hub:
    """`tell` is given lines for the person who runs it."""

    def __init__(self, broker: Broker, hosted: Hosted, settings: HubSettings, tell: Callable[[str], None]) -> None:
        self.broker, self.hosted, self.settings, self._show = broker, hosted, settings, tell
        self._epochs = EpochFile(broker.folder / "epoch")
        self.roster = Roster(
            wanted=settings.peers,
            assigner=hosted.assign,
            hub_bps=settings.hub_bps,
            patience_seconds=settings.patience_seconds,
            last_epoch=self._epochs.read(),
        )
        self._hearts = Hearts(settings.lost_after_seconds)
        self._changed = asyncio.Condition()
        self._votes, self._accusations = VoteService(), Accusations()
        self._stop_wanted, self._stopping = False, ""
        self._gone = asyncio.Event()
        self.gate = Gate(broker, run=settings.run, public_url=settings.public_url, code=hosted.code, tell=self._tell)
        self._beginning: Beginning
        """Of the current epoch."""
        self._store = StoreService()

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
            STORE: self._store,
            VOTE: self._votes,
            FILE: FileService(self.hosted.find),
            KEEP: KeepService(self.hosted.accept, self.hosted.kept),
            LINE: line_service,
        }
        for name, service in services.items():
            await serve(self._client, name, service)
        await self.gate.open(self._client)
        try:
            await begin(self)
            return await self._watch()
        finally:
            await self._client.close()

    async def _watch(self) -> str:
        ended_at: float | None = None
        looked = time.monotonic()
        while not self._gone.is_set():
            now = time.monotonic()
            if now - looked > _LATE_SECONDS:  # this machine slept, or was busy: beats wait to be heard
                self._hearts.excuse(now - looked)
            looked = now
            for name in self._hearts.newly_lost(now):
                if name in self.roster.present:
                    await self._client.publish("bcast.lost", name.encode())
                    await self._remove(name, f"{name} is lost: nothing was heard of it")
            if self._stop_wanted and not self.roster.at_work:
                self._stopping = "stopped by the hub's owner; the same command goes on"
            elif self._stop_wanted:  # again and again, for those who have begun to listen just now
                await self._client.publish("bcast.stop", b"")
            ended = self._stopping or self.hosted.ended
            if ended and ended_at is None:
                ended_at = now
                await self._notify()
            if ended_at is not None and (not self.roster.present or now - ended_at > _FAREWELL_SECONDS):
                return ended
            await asyncio.sleep(_LOOK_SECONDS)
        raise ConnectionError(f"nats-server is gone. The end of its log:\n{self.broker.log_tail()}")

    def stop(self) -> None:
        """Asks the peers to save and to stop. No epoch begins any more."""
        self._stop_wanted = True

    # What peers ask. `peer` is who asks: the server lets nobody ask as another.

    async def _beat(self, peer: str, _data: bytes) -> None:
        if peer in self.broker.peers:
            self._hearts.beat(peer, time.monotonic())

    async def _next(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, NextRequest)
        if request is None or peer not in self.broker.peers:
            return None
        if other := self.gate.other_code(request.code):
            return _encode(Refused(text=other))
        if peer not in self.roster.present:
            self._tell(f"{peer} is there")
        self._hearts.beat(peer, time.monotonic())
        over = self.roster.asked(peer, request, time.monotonic())
        if over is not None:
            await self._over(say(over))
        await self._hear_accusation(peer, request)
        await self._notify()
        return _encode(await self._answer(peer))

    async def _hear_accusation(self, peer: str, request: NextRequest) -> None:
        accused, epoch = request.accuses, self.roster.latest
        if accused is None or epoch is None or request.took_part_in != epoch.number:
            return
        if self._accusations.give(peer, accused, epoch.number, epoch.names) and accused.name in self.broker.peers:
            what = f"twice in step {accused.step}: {say(accused.what)}"
            await self._expel(
                accused.name,
                f"the others have removed you from the run, for what you sent was bad {what}. Perhaps memory or "
                "processor are at fault; only the hub's owner can invite you again",
                f"{accused.name} was removed by the others: what it sent was bad {what}",
            )

    async def _answer(self, peer: str) -> Answer:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            if self._stopping or self.hosted.ended:
                return Done(text=self._stopping or self.hosted.ended)
            before = self.roster.last_epoch
            found = None if self._stop_wanted else self.roster.next_for(peer, time.monotonic())
            if self.roster.last_epoch != before:
                await self._begun()
            if isinstance(found, Measure):
                return found if found.together else self.hosted.measure
            if found is not None:
                return self._work(found)
            left = deadline - time.monotonic()
            if left <= 0:
                return Wait(text=self.roster.why_waiting(peer))
            async with self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, 1.0))

    async def _begun(self) -> None:
        epoch = self.roster.current
        assert epoch is not None
        self._epochs.write(epoch.number)
        self._store.clear()
        await self._votes.begin(epoch.number, epoch.names)
        self._beginning = self.hosted.begin(list(epoch.shares.values()))
        shares = ", ".join(f"{name}: {share}" for name, share in epoch.shares.items())
        self._tell(f"epoch {epoch.number}: segments {shares}; slowest part: {epoch.assignment.bottleneck}")
        await self._notify()

    def _work(self, epoch: Epoch) -> Work:
        beginning = self._beginning
        return Work(
            epoch=epoch.number,
            names=epoch.names,
            shares=list(epoch.shares.values()),
            lives=dict(epoch.lives),
            settings=beginning.settings,
            manifest=beginning.manifest,
            facts=beginning.facts,
            tokenizer=beginning.tokenizer,
            removed_for=self._accusations.steps,
            text=f"slowest part: {epoch.assignment.bottleneck}",
        )

    async def _ready(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, Ready)
        if request is None or not self._works(peer, request.epoch):
            return None
        refusal = self.hosted.compare(request.hashes)
        if refusal:
            await self._remove(peer, f"{peer} was refused: {refusal}")
        return _encode(Verdict(refusal=refusal))

    async def _leave(self, peer: str, _data: bytes) -> bytes | None:
        await self._remove(peer, f"{peer} has left")
        return _encode(Verdict())

    async def _tokens(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, TokensRequest)
        if request is None or not self._works(peer):
            return None
        try:
            return await asyncio.to_thread(self.hosted.tokens, request.split, request.index)
        except IndexError:
            return None

    async def _saved(self, peer: str, data: bytes) -> bytes | None:
        """Also after the epoch is over, until the next begins: what was saved is good."""
        request, latest = _decode(data, SavedRequest), self.roster.latest
        if request is None:
            return None
        if latest is None or latest.number != request.epoch or peer not in latest.names:
            return _encode(Verdict(refusal="it is not of this epoch"))
        return _encode(self.hosted.saved(peer, latest.names, request.manifest))

    async def _event(self, peer: str, data: bytes) -> None:
        if self.roster.current is None or peer != self.roster.current.names[0] or len(data) > _MOST_EVENT_NBYTES:
            return
        event = read(_EVENTS, data)
        if event is not None and b"\\u00" not in data:  # so JSON writes what could move a cursor
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
        await self._remove(name, why)
        await self._client.publish(f"m.{name}.{HUB}.note", told.encode())
        await self._client.flush(timeout=5)
        await asyncio.to_thread(self.broker.remove_peer, name)
        await self._remove(name, why)

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
            waits_for="" if epoch else roster.problem or f"{len(peers)} of {roster.wanted} peers are there",
            peers=peers,
            away=[name for name in self.broker.peers if name not in roster.present],
            bottleneck=epoch.assignment.bottleneck if epoch else "",
            hub_bps=roster.hub_rates if peers else (0.0, 0.0),
            progress=dict(self.hosted.progress),
        )

    def _works(self, peer: str, epoch: int | None = None) -> bool:
        current = self.roster.current
        return current is not None and peer in current.names and epoch in (None, current.number)

    async def _remove(self, name: str, why: str) -> None:
        known = name in self.roster.present
        over = self.roster.gone(name, why)
        if known:
            self._tell(why)
        if over is not None:
            await self._over(over)
        await self._notify()

    async def _over(self, why: str) -> None:
        self._tell(f"epoch {self.roster.last_epoch} is over: {why}")
        await self._votes.end()
        await self._client.publish("bcast.over", f"{self.roster.last_epoch} {why}".encode())

    def _tell(self, text: str) -> None:
        self._show(say(text, _MOST_LINE))

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class EpochFile:
    """The number of the last epoch, on the disk before anybody hears of it: epochs only grow, whatever happens."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        return int(self._path.read_text()) if self._path.exists() else 0

    def write(self, number: int) -> None:
        write_atomically(self._path, str(number).encode())


def _encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def _decode(data: bytes, kind: type[Request]) -> Request | None:
    return read(_decoder(kind), data)


@cache
def _decoder(kind: type[Request]) -> "msgspec.msgpack.Decoder[Request]":
    return msgspec.msgpack.Decoder(kind)
