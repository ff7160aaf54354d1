"""Repair of the hub's newest checkpoint, which must be complete before a generation begins.

Every present peer is asked once per incarnation for the missing files. If files are still missing after all were asked,
the hub waits `patience_seconds` for absent peers and then rolls back to the previous checkpoint, and says so.
"""

import asyncio
from collections.abc import Callable, Collection

from thinpipe.swarm.hub.run_host import RunHost
from thinpipe.swarm.protocol.messages import RestoreFiles


class Repair:
    """Verification and repair of the newest checkpoint between two generations. `tell` prints a line for the hub's
    owner."""

    def __init__(self, run_host: RunHost, patience_seconds: float, tell: Callable[[str], None]) -> None:
        self._run_host, self._patience_seconds, self._tell = run_host, patience_seconds, tell
        self.uploaded: dict[str, str] = {}
        """By peer: sha256 of the manifest for which the peer has uploaded all the missing files that it has."""
        self._since: float | None = None
        """Time at which the missing files were noticed; None: no file is missing."""
        self._must_verify = self._reverified = False
        """`_must_verify`: the checkpoint is to be read. `_reverified`: it was already read a second time since the last
        generation."""
        self._verification: asyncio.Task[None] | None = None
        self.waits_for = self._last_status = ""
        """`waits_for`: what the repair waits for, in words; empty: nothing. `_last_status`: last text printed after a
        rollback."""

    def require_verification(self) -> None:
        """A generation is over: the whole checkpoint is read before the next one begins."""
        self._must_verify, self._reverified = True, False

    def verify_once_more(self) -> None:
        """A generation could not begin from the checkpoint: it is read once more, but only once until something
        changes."""
        if not self._reverified:
            self._must_verify = self._reverified = True

    async def verification_status(self, seconds: float) -> str:
        """Starts a due verification and waits up to `seconds` for it. Returns what the hub is reading, in words, if it
        has not finished; the verification continues in the background. Empty: verification is done."""
        if self._verification is None and self._must_verify:
            self._must_verify = False
            self._verification = asyncio.create_task(self._run_host.verify_newest())
        if (verification := self._verification) is None:
            return ""
        await asyncio.wait((verification,), timeout=seconds)
        if verification.done() and self._verification is verification:  # only the first waiter handles the result
            self._verification, self._must_verify = None, self._must_verify or verification.exception() is not None
            verification.result()
        is_verifying = self._verification is not None or self._must_verify
        self.waits_for = (
            f"the hub reads step {self._run_host.committed} to see whether it is whole" if is_verifying else ""
        )
        return self.waits_for

    def next_for(self, peer: str, now: float, present: Collection[str], away: Collection[str]) -> RestoreFiles | str:
        """The files that this peer restores, or why it has to wait; empty when no file is missing."""
        if not self._run_host.missing:
            if self._since is not None:
                self._tell(f"step {self._run_host.committed} is whole again")
            self._since, self.waits_for = None, ""
            return ""
        if self._since is None:
            self._since = now
            self._tell(f"{self._run_host.describe_missing(present, away)}: asking all who are there")
        restore_request = self._run_host.restore_request()
        if self.uploaded.get(peer) != restore_request.manifest:
            return restore_request
        all_uploaded = all(self.uploaded.get(name) == restore_request.manifest for name in present)
        if all_uploaded and now - self._since >= self._patience_seconds:
            self.waits_for = self._run_host.roll_back(present, away)
            if self.waits_for != self._last_status:
                self._tell(self.waits_for)
            self._last_status = self.waits_for
            if self._run_host.missing:
                self._since = now
            else:
                self._since = None
                self.require_verification()
        else:
            self.waits_for = self._run_host.describe_missing(present, away)
        return self.waits_for
