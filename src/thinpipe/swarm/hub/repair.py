"""Repair of the hub's newest checkpoint, which must be complete before a generation begins.

Every present peer is asked once per incarnation for the missing files. If files are still missing after all were asked,
the hub waits `patience_seconds` for absent peers and then rolls back to the previous checkpoint, and says so.
"""

import asyncio
from collections.abc import Callable, Collection

from thinpipe.checkpoint.storage import layer_of
from thinpipe.core.event_text import format_event
from thinpipe.core.hub_events import CheckpointDamaged, CheckpointRepaired, HubEvent, RolledBack
from thinpipe.swarm.hub.run_host import RunHost
from thinpipe.swarm.protocol.messages import RestoreFiles


class Repair:
    """Verification and repair of the newest checkpoint between two generations. `record` logs and prints an event,
    `print_line` prints a line for the hub's owner."""

    def __init__(
        self,
        run_host: RunHost,
        patience_seconds: float,
        record: Callable[[HubEvent], None],
        print_line: Callable[[str], None],
    ) -> None:
        self._run_host, self._patience_seconds = run_host, patience_seconds
        self._record, self._print = record, print_line
        self.uploaded: dict[str, str] = {}
        """By peer: sha256 of the manifest for which the peer has uploaded all the missing files that it has."""
        self._since: float | None = None
        """Time at which the missing files were noticed; None: no file is missing."""
        self._must_verify = self._reverified = False
        """`_must_verify`: the checkpoint is to be read. `_reverified`: it was already read a second time since the last
        generation."""
        self._verification: asyncio.Task[None] | None = None
        self.waits_for = self._no_rollback = ""
        """`waits_for`: what the repair waits for, in words; empty: nothing. `_no_rollback`: why the last rollback was
        impossible, until a file or a peer comes."""

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
        self.waits_for = f"the hub verifies the checkpoint of step {self._run_host.committed}" if is_verifying else ""
        return self.waits_for

    def next_for(self, peer: str, now: float, present: Collection[str], absent: Collection[str]) -> RestoreFiles | str:
        """The files that this peer restores, or why it has to wait; empty when no file is missing."""
        if not self._run_host.missing:
            if self._since is not None:
                self._record(CheckpointRepaired(step=self._run_host.committed))
            self._since, self.waits_for, self._no_rollback = None, "", ""
            return ""
        if self._since is None:
            self._since = now
            self._record(
                CheckpointDamaged(
                    step=self._run_host.committed,
                    layers=sorted(map(layer_of, self._run_host.missing)),
                    reason=self._run_host.describe_missing(present, absent),
                )
            )
        restore_request = self._run_host.restore_request()
        if self.uploaded.get(peer) != restore_request.manifest:
            return restore_request
        all_uploaded = all(self.uploaded.get(name) == restore_request.manifest for name in present)
        if not all_uploaded:
            self._no_rollback = ""  # somebody came who may have the files
        if all_uploaded and now - self._since >= self._patience_seconds:
            outcome = self._run_host.roll_back(present, absent)
            if isinstance(outcome, RolledBack):
                self._record(outcome)
                self.waits_for, self._since, self._no_rollback = format_event(outcome), None, ""
                self.require_verification()
            else:
                if outcome != self._no_rollback:
                    self._print(outcome)
                self.waits_for = self._no_rollback = outcome
                self._since = now
        else:
            self.waits_for = self._no_rollback or self._run_host.describe_missing(present, absent)
        return self.waits_for
