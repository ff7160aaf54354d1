"""Before an epoch begins, the hub's newest checkpoint must be whole: peers are asked for what is missing.

Each is asked once for each life, and gives what it has. When all who are there were asked and something is still
missing, those who are away are waited for; then the hub falls back to the checkpoint before, and says so.
"""

import asyncio
from collections.abc import Callable, Collection

from thinpipe.swarm.hosted import Hosted
from thinpipe.swarm.messages import Give


class Mending:
    def __init__(self, hosted: Hosted, patience_seconds: float, tell: Callable[[str], None]) -> None:
        self._hosted, self._patience, self._tell = hosted, patience_seconds, tell
        self.gave: dict[str, str] = {}
        """What each peer says that it has given all of."""
        self._since: float | None = None
        self._to_look = self._doubted = False
        self._looking: asyncio.Task[None] | None = None
        self.waits_for = self._last_words = ""

    def look_again(self) -> None:
        """An epoch is over: before the next one begins, all of the checkpoint is read."""
        self._to_look, self._doubted = True, False

    def doubt(self) -> None:
        """No epoch could begin from what was read: it is read once more, not again and again while nothing changes."""
        if not self._doubted:
            self._to_look = self._doubted = True

    async def still_reads(self, seconds: float) -> str:
        """What the hub reads, in words, if it is not done in so long; it goes on with it, one reading at a time. Empty:
        all is read."""
        if self._looking is None and self._to_look:
            self._to_look = False
            self._looking = asyncio.create_task(self._hosted.look())
        if (looking := self._looking) is None:
            return ""
        await asyncio.wait((looking,), timeout=seconds)
        if looking.done() and self._looking is looking:  # the first who sees it
            self._looking, self._to_look = None, self._to_look or looking.exception() is not None
            looking.result()
        reads = self._looking is not None or self._to_look
        self.waits_for = f"the hub reads step {self._hosted.committed} to see whether it is whole" if reads else ""
        return self.waits_for

    def next_for(self, peer: str, now: float, present: Collection[str], away: Collection[str]) -> Give | str:
        """What this peer is to give, or why it has to wait; empty when nothing is missing."""
        if not self._hosted.missing:
            if self._since is not None:
                self._tell(f"step {self._hosted.committed} is whole again")
            self._since, self.waits_for = None, ""
            return ""
        if self._since is None:
            self._since = now
            self._tell(f"{self._hosted.what_is_missing(present, away)}: asking all who are there")
        give = self._hosted.give()
        if self.gave.get(peer) != give.manifest:
            return give
        all_gave = all(self.gave.get(name) == give.manifest for name in present)
        if all_gave and now - self._since >= self._patience:
            self.waits_for = self._hosted.fall_back(present, away)
            if self.waits_for != self._last_words:
                self._tell(self.waits_for)
            self._last_words = self.waits_for
            if self._hosted.missing:
                self._since = now
            else:
                self._since = None
                self.look_again()
        else:
            self.waits_for = self._hosted.what_is_missing(present, away)
        return self.waits_for
