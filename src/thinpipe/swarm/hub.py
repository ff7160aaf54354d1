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
from thinpipe.swarm.departures import Departures
from thinpipe.swarm.file_requests import FILE, KEEP
from thinpipe.swarm.file_service import FileService, KeepService
from thinpipe.swarm.gate import Gate
from thinpipe.swarm.hearts import LOST_AFTER_SECONDS, Hearts
from thinpipe.swarm.hosted import Beginning, Hosted, Outlook
from thinpipe.swarm.line_test import SERVICE as LINE
from thinpipe.swarm.line_test import line_service
from thinpipe.swarm.mending import Mending
from thinpipe.swarm.messages import (
    AdminAnswer,
    AdminRequest,
    Answer,
    Done,
    Give,
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
from thinpipe.swarm.progress import Watch
from thinpipe.swarm.reading import read, say
from thinpipe.swarm.roster import Epoch, Roster
from thinpipe.swarm.services import Service, serve
from thinpipe.swarm.status import PeerStatus, Status
from thinpipe.swarm.store_service import StoreService
from thinpipe.swarm.vote_service import SERVICE as VOTE
from thinpipe.swarm.vote_service import VoteService
from thinpipe.transport.nats.dial import connect
from thinpipe.transport.nats.progress import BEATS
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
    progress_factor: float = 4.0
    progress_floor_seconds: float = 10.0
    start_seconds: float = 300.0
    """What cannot be measured before it is done may take so long."""


class Hub:
    """`tell` is given lines for the person who runs it."""

    def __init__(self, broker: Broker, hosted: Hosted, settings: HubSettings, tell: Callable[[str], None]) -> None:
        self.broker, self.hosted, self.settings, self._show = broker, hosted, settings, tell
        self._epochs, self._line = EpochFile(broker.folder / "epoch"), LineFile(broker.folder / "line.json")
        self.roster = Roster(
            wanted=settings.peers,
            assigner=hosted.assign,
            hub_bps=settings.hub_bps or self._line.read(),
            patience_seconds=settings.patience_seconds,
            last_epoch=self._epochs.read(),
        )
        self._hearts = Hearts(settings.lost_after_seconds)
        self._progress = Watch(
            factor=settings.progress_factor, floor=settings.progress_floor_seconds, start=settings.start_seconds
        )
        self._changed = asyncio.Condition()
        self._votes, self._accusations = VoteService(), Accusations()
        self._stop_wanted, self._stopping = False, ""
        self._gone = asyncio.Event()
        self.gate = Gate(broker, run=settings.run, public_url=settings.public_url, code=hosted.code, tell=self._tell)
        self._beginning: Beginning
        """Of the current epoch."""
        self._store = StoreService()
        self._committed = hosted.committed
        self._mending = Mending(hosted, settings.patience_seconds, self._tell)
        self._told: dict[str, str] = {}

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
            KEEP: KeepService(self.hosted.accept, self.hosted.kept, self.hosted.not_kept),
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
        looked = time.monotonic()
        while not self._gone.is_set():
            now = time.monotonic()
            if now - looked > _LATE_SECONDS:  # this machine slept, or was busy: beats wait to be heard
                self._hearts.excuse(now - looked)
                self._progress.excuse(now - looked)
            looked = now
            for name in self._hearts.newly_lost(now):
                await self._lost(name, f"{name} is lost: nothing was heard of it")
            await self._look_at_progress(now)
            await self._let_in()
            if self._stop_wanted and not self.roster.at_work:
                self._stopping = "stopped by the hub's owner; the same command goes on"
            elif self._stop_wanted:  # again and again, for those who have begun to listen just now
                await self._client.publish("bcast.stop", b"")
            self._tell_if_new("commits", self.hosted.commits)
            ended = self._stopping or self.hosted.ended
            if ended and ended_at is None:
                ended_at = now
                await self._notify()
            if ended_at is not None and (not self.roster.present or now - ended_at > _FAREWELL_SECONDS):
                return ended
            await asyncio.sleep(_LOOK_SECONDS)
        raise ConnectionError(f"nats-server is gone. The end of its log:\n{self.broker.log_tail()}")

    async def _look_at_progress(self, now: float) -> None:
        for still in self._progress.still(now):
            await self._lost(still.name, still.words)
        stuck = self._progress.circle()
        if stuck is not None:
            why = f"all peers have waited for each other for {stuck:.0f} s"
            if self.roster.end():
                await self._over(why)
                await self._notify()

    async def _lost(self, name: str, why: str) -> None:
        if name in self.roster.present:
            await self._client.publish("bcast.lost", name.encode())
            await self._remove(name, why)

    def stop(self) -> None:
        """Asks the peers to save and to stop. No epoch begins any more."""
        self._stop_wanted = True

    # What peers ask. `peer` is who asks: the server lets nobody ask as another.

    async def _beat(self, peer: str, data: bytes) -> None:
        beat = read(BEATS, data)
        if beat is not None and peer in self.broker.peers:
            self._hearts.beat(peer, time.monotonic())
            self._progress.beat(peer, beat)

    async def _disconnected(self, peer: str) -> None:
        """A program that ends leaves no connection. A line that is cut keeps one for a while, without beats."""
        await self._lost(peer, f"{peer} is lost: its connection is closed")

    async def _next(self, peer: str, data: bytes) -> bytes | None:
        request = _decode(data, NextRequest)
        if request is None or peer not in self.broker.peers:
            return None
        if other := self.gate.other_code(request.code):
            return _encode(Refused(text=other))
        if self.roster.is_past(peer, request.life):
            return _encode(Refused(text=f"{peer} was started again after this one, and takes part once"))
        if peer not in self.roster.present:
            self._tell(f"{peer} is there")
        self._hearts.beat(peer, time.monotonic())
        self._mending.gave[peer] = request.gave
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
        deadline, newest = time.monotonic() + ANSWER_SECONDS, self.hosted.newest_manifest()
        while True:
            if self._stopping or self.hosted.ended:
                return Done(text=self._stopping or self.hosted.ended)
            answer = await self._answer_now(peer)
            left = deadline - time.monotonic()
            if not isinstance(answer, Wait):
                return answer
            running, copy = self.roster.current is not None, self.hosted.newest_manifest()
            if left <= 0 or (running and copy != newest):
                return Wait(text=answer.text, manifest=copy if running else b"")
            async with self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, _LOOK_SECONDS))

    async def _answer_now(self, peer: str) -> Answer:
        if self.roster.current is None:
            await self._mending.look()
            missing = self._mend(peer)
            if missing:
                return missing if isinstance(missing, Give) else Wait(text=missing)
        before = self.roster.last_epoch
        found = None if self._stop_wanted else self.roster.next_for(peer, time.monotonic())
        if self.roster.last_epoch != before:
            try:
                await self._begun()
            except OSError as error:
                self.roster.call_off()
                trouble = f"the hub cannot go on ({error.strerror or error}): put that right there"
                self._tell_if_new("trouble", trouble)
                return Wait(text=trouble)
        if isinstance(found, Measure):
            return found if found.together else self.hosted.measure
        if found is not None:
            return self._work(found)
        if self.roster.problem:
            self._tell_if_new("problem", self.roster.waits_for)
        return Wait(text=self.roster.why_waiting(peer))

    def _mend(self, peer: str) -> Give | str:
        """What a peer has to give, or why all have to wait, while the newest checkpoint is not whole; else nothing."""
        present = self.roster.present
        measured = peer in present and self.roster.report_of(peer) is not None
        if not measured or self.roster.at_work:
            return ""
        away = [name for name in self.broker.peers if name not in present]
        return self._mending.next_for(peer, time.monotonic(), present, away)

    async def _begun(self) -> None:
        epoch = self.roster.current
        assert epoch is not None
        self._epochs.write(epoch.number)
        if self.settings.hub_bps is None and self.roster.hub_bps is not None:
            self._line.write(self.roster.hub_bps)
        self._store.clear()
        # Nothing is awaited before this: whoever asks meanwhile is told of this epoch.
        self._beginning, self._committed = self.hosted.begin(epoch, self._outlook(epoch)), self.hosted.committed
        self._progress.begin(epoch.number, epoch.shares, time.monotonic())
        await self._votes.begin(epoch.number, epoch.names)
        shares = ", ".join(f"{name}: {share}" for name, share in epoch.shares.items())
        self._tell(f"epoch {epoch.number}: segments {shares}; slowest part: {epoch.assignment.bottleneck}")
        await self._notify()

    def _outlook(self, epoch: Epoch) -> Outlook:
        reports = [self.roster.report_of(name) for name in epoch.names]
        return Outlook(
            tokens_per_second=epoch.assignment.tokens_per_second,
            up_bps=[report.up_bps for report in reports if report is not None],
            hub_down_bps=self.roster.hub_rates[1],
            latency_s=max(report.latency_s for report in reports if report is not None),
        )

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
            text=f"slowest part: {epoch.assignment.bottleneck}; {self.hosted.commits}",
            keep_bytes_per_second=beginning.keep_bytes_per_second,
            removed_for=self._accusations.steps,
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
        verdict = self.hosted.saved(peer, latest.number, request.manifest)
        return _encode(msgspec.structs.replace(verdict, committed=self.hosted.committed))

    async def _let_in(self) -> None:
        """Those who came while fewer than wanted computed: after a commit, nothing is lost but moments."""
        step, before = self.hosted.committed, self._committed
        self._committed = step
        if step == before or self._stop_wanted or self.hosted.ended:
            return
        over = self.roster.committed(step)
        if over is not None:
            await self._over(over)
            await self._notify()

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
            waits_for="" if epoch else self._mending.waits_for or roster.waits_for,
            peers=peers,
            away=[name for name in self.broker.peers if name not in roster.present],
            bottleneck=epoch.assignment.bottleneck if epoch else "",
            hub_bps=roster.hub_rates if peers else (0.0, 0.0),
            progress=dict(self.hosted.progress),
            commits=self.hosted.commits,
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
        number = self.roster.last_epoch  # the next may begin while we wait
        self._mending.look_again()
        self._tell(f"epoch {number} is over: {why}")
        self._progress.end()
        await self._votes.end()
        await self._client.publish("bcast.over", f"{number} {why}".encode())

    def _tell(self, text: str) -> None:
        self._show(say(text, _MOST_LINE))

    def _tell_if_new(self, about: str, text: str) -> None:
        if text and self._told.get(about) != text:
            self._told[about] = text
            self._tell(text)

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


class LineFile:
    """What the hub's line was measured to do, up and down: a hub that was started again need not measure it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> tuple[float, float] | None:
        with suppress(FileNotFoundError, msgspec.DecodeError):
            return msgspec.json.decode(self._path.read_bytes(), type=tuple[float, float])
        return None

    def write(self, bps: tuple[float, float]) -> None:
        if self.read() != bps:
            write_atomically(self._path, msgspec.json.encode(bps))


def _encode(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


def _decode(data: bytes, kind: type[Request]) -> Request | None:
    return read(_decoder(kind), data)


@cache
def _decoder(kind: type[Request]) -> "msgspec.msgpack.Decoder[Request]":
    return msgspec.msgpack.Decoder(kind)
