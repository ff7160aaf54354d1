"""Who computes together, from which commit on, and when that is over: epochs, as the hub begins and ends them.

The roster decides who, the ballot counts votes, hearts and progress say who is lost, the ledger what is committed; here
they act on each other. What peers ask comes by way of the hub, which also publishes for us.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from thinpipe.core.errors import UserError
from thinpipe.core.events import Arrived, Assembled, Departed, PeerPlace
from thinpipe.swarm.accusations import Accusations
from thinpipe.swarm.errands import ERRAND_SECONDS, Errands
from thinpipe.swarm.hearts import LOST_AFTER_SECONDS, Hearts
from thinpipe.swarm.hosted import Beginning, Hosted, Outlook
from thinpipe.swarm.hub_memory import EpochFile, LineFile
from thinpipe.swarm.mending import Mending
from thinpipe.swarm.messages import Accusation, Answer, Done, Give, Measure, NextRequest, Wait, Work
from thinpipe.swarm.progress import Watch
from thinpipe.swarm.reading import say
from thinpipe.swarm.roster import MOST_SECONDS_TO_SAVE, Epoch, Roster
from thinpipe.swarm.store_service import StoreService
from thinpipe.swarm.vote_service import VoteService
from thinpipe.transport.nats.progress import Beat
from thinpipe.transport.nats.requests import Answered

ANSWER_SECONDS = 10.0
"""A peer that asks what to do is answered after so long, if only that it has to wait."""
LOOK_SECONDS = 0.2

_NOBODY = msgspec.msgpack.encode(Answered(found=False))

Publish = Callable[[str, bytes], Awaitable[None]]
Tell = Callable[[str], None]


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
    errand_seconds: float = ERRAND_SECONDS
    """And so long what a peer does outside of an epoch."""


class Epochs:
    """`publish` tells all peers; `tell` is given lines for the person who runs the hub; `members` says who belongs."""

    def __init__(
        self,
        hosted: Hosted,
        settings: HubSettings,
        memory: tuple[EpochFile, LineFile],
        publish: Publish,
        tell: Tell,
        members: Callable[[], Collection[str]],
    ) -> None:
        self.hosted, self.settings, self.members = hosted, settings, members
        self._numbers, self._line = memory
        self.roster = Roster(
            wanted=settings.peers,
            assigner=hosted.assign,
            hub_bps=settings.hub_bps or self._line.read(),
            patience_seconds=settings.patience_seconds,
            last_epoch=self._numbers.read(),
        )
        self.hearts = Hearts(settings.lost_after_seconds)
        self.progress = Watch(
            factor=settings.progress_factor, floor=settings.progress_floor_seconds, start=settings.start_seconds
        )
        self.errands = Errands(settings.errand_seconds)
        self.votes, self.store, self.accusations = VoteService(), StoreService(), Accusations()
        self.mending = Mending(hosted, settings.patience_seconds, tell)
        self.stop_wanted, self.stopping = False, ""
        """No epoch begins any more; and why all is over, once it is."""
        self._publish, self._tell = publish, tell
        self._changed = asyncio.Condition()
        self._beginning: Beginning
        """Of the current epoch."""
        self._committed = hosted.committed
        self._told: dict[str, str] = {}
        self.barred: set[str] = set()
        """Who is being expelled: it may ask until its key is gone."""

    @property
    def ended(self) -> str:
        """Why the run is over, in words; empty while it goes on."""
        return self.stopping or self.hosted.ended

    def works(self, peer: str, epoch: int | None = None) -> bool:
        current = self.roster.current
        return current is not None and peer in current.names and epoch in (None, current.number)

    # What peers do

    async def meet(self, peer: str, data: bytes) -> bytes | None:
        """The store, for those who compute; others wait for somebody who will not come."""
        return await self.store(peer, data) if self.works(peer) else _NOBODY

    def beat(self, peer: str, beat: Beat) -> None:
        self.hearts.beat(peer, time.monotonic())
        self.progress.beat(peer, beat)

    def excuse(self, seconds: float) -> None:
        """We did not listen for so long: nobody is to blame for it."""
        self.hearts.excuse(seconds)
        self.progress.excuse(seconds)
        self.errands.excuse(seconds)

    async def asked(self, peer: str, request: NextRequest) -> Accusation | None:
        """A peer wants to know what to do, and tells what it did. Returns whom enough of them accuse: no epoch has it
        any more, and the hub expels it."""
        if peer not in self.roster.present:
            self._tell(f"{peer} is there")
            self.hosted.heard(Arrived(step=self.hosted.committed, peer=peer))
        self.hearts.beat(peer, time.monotonic())
        self.errands.done(peer)
        self.mending.gave[peer] = request.gave
        accused = self._accused(peer, request)
        life = self.roster.life_of(peer)
        over = self.roster.asked(peer, request, time.monotonic())
        if life not in (None, self.roster.life_of(peer)):  # it was started again: what it was sending it never will
            self.hosted.gone(peer)
            self._departed(peer, f"{peer} was started again", over)
            self.hosted.heard(Arrived(step=self.hosted.committed, peer=peer))
        if accused is not None:  # before anything is awaited: the next epoch may begin meanwhile
            self.barred.add(accused.name)
            over = self.roster.gone(accused.name, f"{accused.name} is accused") or over
            self._departed(accused.name, f"{accused.name} was removed by the others for what it sent", over)
        if over is not None:
            await self._over(say(over))
        return accused

    def _accused(self, peer: str, request: NextRequest) -> Accusation | None:
        accused, epoch = request.accuses, self.roster.latest
        if accused is None or epoch is None or request.took_part_in != epoch.number:
            return None
        known = accused.name in self.members()
        return accused if known and self.accusations.give(peer, accused, epoch.number, epoch.names) else None

    async def answer(self, peer: str) -> Answer:
        deadline, newest = time.monotonic() + ANSWER_SECONDS, self.hosted.newest_manifest()
        while True:
            if self.ended:
                return Done(text=self.ended, again=bool(self.stopping))
            answer = await self._answer_now(peer)
            left = deadline - time.monotonic()
            if not isinstance(answer, Wait):
                return answer
            running, copy = self.roster.current is not None, self.hosted.newest_manifest()
            if left <= 0 or (running and copy != newest):
                return Wait(text=answer.text, manifest=copy if running else b"")
            async with self._changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(left, LOOK_SECONDS))

    async def _answer_now(self, peer: str) -> Answer:
        if self.roster.current is None:
            reading = await self.mending.still_reads(LOOK_SECONDS)
            if reading:
                return Wait(text=reading)
            missing = self._mend(peer)
            if missing:
                return missing if isinstance(missing, Give) else Wait(text=missing)
        before = self.roster.last_epoch
        over = self.stop_wanted or bool(self.ended)  # it may have ended while we read
        found = None if over else self.roster.next_for(peer, time.monotonic())
        if self.roster.last_epoch != before:
            try:
                await self._begun()
            except (OSError, UserError) as error:
                self.roster.call_off()
                reason = error.strerror or error if isinstance(error, OSError) else error
                trouble = f"the hub cannot go on ({reason}): put that right there"
                self.tell_if_new("trouble", trouble)
                return Wait(text=trouble)
        if isinstance(found, Measure):
            return found if found.together else self.hosted.measure
        if found is not None:
            return self._work(found)
        if self.roster.problem:
            self.tell_if_new("problem", self.roster.waits_for)
        return Wait(text=self.roster.why_waiting(peer))

    def _mend(self, peer: str) -> Give | str:
        """What a peer has to give, or why all have to wait, while the newest checkpoint is not whole; else nothing."""
        present = self.roster.present
        measured = peer in present and self.roster.report_of(peer) is not None
        if not measured or self.roster.current is not None:
            return ""
        away = [name for name in self.members() if name not in present]
        if self.roster.at_work:  # a newer one may be on its way
            return self.hosted.what_is_missing(present, away) if self.hosted.missing else ""
        return self.mending.next_for(peer, time.monotonic(), present, away)

    async def _begun(self) -> None:
        epoch = self.roster.current
        assert epoch is not None
        self._numbers.write(epoch.number)
        if self.settings.hub_bps is None and self.roster.hub_bps is not None:
            self._line.write(self.roster.hub_bps)
        self.store.clear()
        # Nothing is awaited before this: whoever asks meanwhile is told of this epoch.
        try:
            self._beginning, self._committed = self.hosted.begin(epoch, self._outlook(epoch)), self.hosted.committed
        except (OSError, UserError):
            self.mending.doubt()
            raise
        self.progress.begin(epoch.number, epoch.shares, time.monotonic())
        await self.votes.begin(epoch.number, epoch.names)
        shares = ", ".join(f"{name}: {share}" for name, share in epoch.shares.items())
        self._tell(f"epoch {epoch.number}: segments {shares}; slowest part: {epoch.assignment.bottleneck}")
        self.hosted.heard(Assembled(epoch=epoch.number, step=self._committed, peers=self._places(epoch)))
        await self.notify()

    def _outlook(self, epoch: Epoch) -> Outlook:
        reports = [self.roster.report_of(name) for name in epoch.names]
        return Outlook(
            tokens_per_second=epoch.assignment.tokens_per_second,
            up_bps=[report.up_bps for report in reports if report is not None],
            hub_down_bps=self.roster.hub_rates[1],
            latency_s=max(report.latency_s for report in reports if report is not None),
        )

    def _places(self, epoch: Epoch) -> list[PeerPlace]:
        reports = [(name, segments, self.roster.report_of(name)) for name, segments in epoch.assignment.places]
        return [report.place(name, segments) for name, segments, report in reports if report is not None]

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
            removed_for=self.accusations.steps,
        )

    async def look(self, now: float) -> None:
        """Whose heart is silent, and who stands still."""
        for name in self.hearts.newly_lost(now):
            await self.lost(name, f"{name} is lost: nothing was heard of it")
        for still in self.progress.still(now):
            await self.lost(still.name, still.words)
        for name, words in self.errands.late(now):
            await self.lost(name, words)
        for name in self.roster.overdue(now):
            words = f"its heart beats, but it has not come out of epoch {self.roster.last_epoch}"
            await self.lost(name, f"{name} is lost: {words} (deadline {MOST_SECONDS_TO_SAVE:.0f} s)")
        stuck = self.progress.circle()
        if stuck is not None:
            why = f"all peers have waited for each other for {stuck:.0f} s"
            if self.roster.end():
                await self._over(why)
                await self.notify()

    async def lost(self, name: str, why: str) -> None:
        if name in self.roster.present:
            await self._publish("bcast.lost", name.encode())
            await self.remove(name, why)

    async def let_in(self) -> None:
        """Those who came while fewer than wanted computed: after a commit, nothing is lost but moments."""
        step, before = self.hosted.committed, self._committed
        self._committed = step
        if step == before or self.stop_wanted or self.hosted.ended:
            return
        over = self.roster.committed(step)
        if over is not None:
            await self._over(over)
            await self.notify()

    async def remove(self, name: str, why: str) -> None:
        known = name in self.roster.present
        over = self.roster.gone(name, why)
        self.hosted.gone(name)
        self.progress.gone(name)
        self.errands.done(name)
        if known:
            self._tell(why)
            self._departed(name, why, over)
        if over is not None:
            await self._over(over)
        await self.notify()

    def _departed(self, name: str, why: str, over: str | None) -> None:
        """Before anything is awaited: the next epoch may begin meanwhile."""
        ended = 0 if over is None else self.roster.last_epoch
        self.hosted.heard(Departed(step=self.hosted.committed, epoch=ended, peer=name, reason=say(why)))

    async def _over(self, why: str) -> None:
        number = self.roster.last_epoch  # the next may begin while we wait
        self.mending.look_again()
        self._tell(f"epoch {number} is over: {why}")
        self.progress.end()
        await self.votes.end(why)
        await self.store.send_away()
        await self._publish("bcast.over", f"{number} {why}".encode())

    def tell_if_new(self, about: str, text: str) -> None:
        if text and self._told.get(about) != text:
            self._told[about] = text
            self._tell(text)

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
