"""What a peer does next: the answer to its `NextRequest`, as a long poll. Repairs come before generations."""

import asyncio
import logging
import time
from contextlib import suppress

from thinpipe.core.errors import UserError
from thinpipe.core.foreign import sanitize
from thinpipe.swarm.hub.assignments import make_assignment, measuring_text
from thinpipe.swarm.hub.generations import CHECK_INTERVAL_SECONDS, Generations
from thinpipe.swarm.protocol.messages import Answer, Finished, Measure, RestoreFiles, Standby

LONG_POLL_SECONDS = 10.0
"""Seconds after which a peer's `NextRequest` is answered with `Standby` if there is nothing else to do."""
_RESTART_SECONDS = 1.0
"""Seconds between two attempts to begin a generation, if the first failed."""

_LOG = logging.getLogger(__name__)


class Answers:
    """Begins the generations that peers ask for."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._trouble, self._next_start_at = "", 0.0
        """Why the last start of a generation failed, and the time before which none is tried."""

    async def answer(self, peer: str) -> Answer:
        """Long poll: waits up to `LONG_POLL_SECONDS` for something other than `Standby`, or for a newer checkpoint to
        mirror."""
        generations, deadline = self._generations, time.monotonic() + LONG_POLL_SECONDS
        newest = generations.run_host.newest_manifest()
        while True:
            if generations.ended:
                return Finished(text=generations.ended, will_resume=bool(generations.stop_reason))
            answer = await self._answer_now(peer)
            left = deadline - time.monotonic()
            if not isinstance(answer, Standby):
                return answer
            running, copy = bool(generations.membership.running), generations.run_host.newest_manifest()
            if left <= 0 or (running and copy != newest):
                return Standby(text=answer.text, manifest=copy if running else b"")
            async with generations.changed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(generations.changed.wait(), min(left, CHECK_INTERVAL_SECONDS))

    async def _answer_now(self, peer: str) -> Answer:
        """The reply according to the present state, without waiting for changes."""
        generations = self._generations
        if not generations.membership.running:
            verifying = await generations.repair.verification_status(CHECK_INTERVAL_SECONDS)
            if verifying:
                return Standby(text=verifying)
            missing = self._next_repair(peer)
            if missing:
                return missing if isinstance(missing, RestoreFiles) else Standby(text=missing)
        if not generations.is_active(peer) and time.monotonic() < self._next_start_at:
            return Standby(text=self._trouble)
        before = generations.membership.last_generation
        over = generations.stop_requested or bool(generations.ended)  # the run may have ended during verification
        try:
            found = None if over else generations.membership.next_for(peer, time.monotonic())
            if generations.membership.last_generation != before:
                await generations.begin_newest()
        except Exception as error:  # of whatever kind: the hub must be able to begin another one
            if generations.membership.last_generation != before:
                generations.membership.cancel_start()
            return self._start_failed(peer, error)
        if isinstance(found, Measure):
            generations.print_once("measuring", measuring_text(peer, found, generations.membership))
            return found if found.concurrent else generations.run_host.measure
        if found is not None:
            services = generations.services_with(found.number)
            if services is None:  # it has ended, and the next has begun, while it was begun
                return Standby(text=generations.membership.wait_reason(peer))
            plan, steps = generations.run_host.commit_plan, generations.suspects.diverged_steps
            return make_assignment(found, services.start, commit_plan=plan, diverged_steps=steps)
        if not generations.membership.running and not over:
            generations.print_once("waits", generations.membership.waits_for)
        return Standby(text=generations.membership.wait_reason(peer))

    def _next_repair(self, peer: str) -> RestoreFiles | str:
        """While the newest checkpoint is incomplete: what this peer restores, or why all peers wait. Otherwise
        empty."""
        generations = self._generations
        present = list(generations.present)
        measured = peer in present and generations.present[peer].report is not None
        if not measured or generations.membership.running:
            return ""
        absent = [name for name in generations.members() if name not in present]
        if generations.membership.busy:  # a newer checkpoint may still be uploading
            return generations.run_host.describe_missing(present, absent) if generations.run_host.missing else ""
        return generations.repair.next_for(peer, time.monotonic(), present, absent)

    def _start_failed(self, peer: str, error: Exception) -> Standby:
        """Tells the owner why no generation could begin, and waits a little before the next attempt."""
        generations = self._generations
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
        generations.print_once("trouble", self._trouble)
        return Standby(text=self._trouble)
