"""The commit ledger: decides when an uploaded checkpoint becomes a commit. Pure.

The state after a step is committed when every peer of the generation has announced the same manifest, and so holds its
own part, and the hub has every file with the announced hash: every layer then has two holders. A step is committed
once. A repeated announcement is accepted; a differing one is refused, as is one that is older than the newest commit or
comes from a generation that is over. Only a commit whose files were lost for good, so that its step is computed again,
may be replaced by other contents, since other hardware may compute other bits.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from thinpipe.core.errors import UserError
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory, CommitState
from thinpipe.swarm.protocol.names import HUB

PENDING_IDLE_SECONDS = 30.0
"""Seconds without an upload after which a pending checkpoint gives way to a newer one."""

AnnounceReply = Literal["begin", "send", "retry", "committed"]
"""Reply to an announcement: upload your files, as the first peer of this checkpoint ("begin") or a further one
("send"); announce again in a moment ("retry"); or the checkpoint is already "committed"."""


class CommitLedger:
    """The newest commit and the pending checkpoint.

    `history`: all commits, including those from before a restart of the hub. `newest`: step of the newest commit whose
    files the hub has.
    """

    def __init__(self, history: CommitHistory | None = None, *, newest: int = 0) -> None:
        self._history = CommitHistory() if history is None else history
        self.newest, self.generation = newest, 0
        self._names: frozenset[str] = frozenset()
        self._gone: set[str] = set()
        """Peers that have left the generation."""
        self._pending: _PendingCheckpoint | None = None
        """The checkpoint that peers are uploading, if any."""

    def is_recorded(self, commit: Commit) -> bool:
        """True if this exact state was committed before; the hub had then lost its files."""
        return self._history.sha256(commit.step) == commit.sha256

    @property
    def pending_step(self) -> int | None:
        """Step of the checkpoint that peers are uploading; None: there is none."""
        return None if self._pending is None else self._pending.state.step

    def begin(self, generation: int, names: Collection[str]) -> None:
        """A generation begins from the newest commit: a pending checkpoint is given up."""
        if generation <= self.generation:
            raise ValueError(f"generation {generation} cannot follow generation {self.generation}")
        self.generation, self._names, self._pending = generation, frozenset(names), None
        self._gone.clear()

    def announce(
        self, peer: str, generation: int, state: CommitState, files: Collection[str], manifest_sha256: str, now: float
    ) -> AnnounceReply:
        """A peer has saved its part (`files`) of this state. `manifest_sha256`: hash of the announced manifest. Raises
        UserError if the announcement is refused."""
        self._refuse(peer, generation, state)
        if state.step == self.newest:
            return "committed"
        pending = self._pending
        begins = pending is None or state.step > pending.state.step
        if pending is None or begins:
            if pending is not None and pending.is_awaited(peer, now):
                return "retry"
            pending = self._pending = _PendingCheckpoint(state, manifest_sha256, self._names, now)
        if (state, manifest_sha256) != (pending.state, pending.manifest_sha256):
            raise UserError(f"another peer has announced different contents of step {pending.state.step}")
        pending.unannounced.discard(peer)
        pending.announced_files[peer] = frozenset(files)
        if unavailable := pending.unavailable_files(self._gone):
            self._pending = None
            raise UserError(f"no connected peer has {unavailable[0]} of step {state.step}")
        return "begin" if begins else "send"

    def _refuse(self, peer: str, generation: int, state: CommitState) -> None:
        """Raises UserError if the announcement cannot become a commit."""
        if generation != self.generation or peer not in self._names:
            raise UserError("the checkpoint is not of the current generation")
        if state.step < self.newest:
            raise UserError(f"there is a newer checkpoint, of step {self.newest}")
        if state.step not in (self.newest, self.pending_step) and self._gone & self._names:
            missing = ", ".join(sorted(self._gone & self._names))
            raise UserError(f"{missing} left before uploading its part of step {state.step}")
        if state.step == self.newest and self._history.sha256(state.step) not in ("", state.sha256):
            raise UserError(
                f"step {state.step} is already committed with different contents, and commits do not change"
            )

    def drop_peer(self, peer: str) -> None:
        """The peer is gone and will announce and upload nothing more: a pending checkpoint that cannot become complete
        without it is given up."""
        self._gone.add(peer)
        pending = self._pending
        if pending is not None and (peer in pending.unannounced or pending.unavailable_files(self._gone)):
            self._pending = None

    def expects(self, peer: str, step: int, file: str, now: float) -> bool:
        """True if this peer may upload this file now: it has announced its part of the pending checkpoint."""
        pending = self._pending
        if pending is None or step != pending.state.step or file not in pending.state.files:
            return False
        if peer not in self._names or peer in pending.unannounced:
            return False
        pending.last_activity_at = now
        return True

    def on_file_received(self, peer: str, step: int, file: str) -> None:
        """The hub has this file with the right hash; the peer that uploaded it is the second holder."""
        pending = self._pending
        if pending is None or step != pending.state.step or peer not in self._names or peer in pending.unannounced:
            return
        if file in pending.holders:
            pending.holders[file].add(peer)

    def abandon_pending(self) -> None:
        """Gives up the pending checkpoint, which cannot be stored."""
        self._pending = None

    def holders_of(self, files: Collection[str]) -> dict[str, list[str]]:
        """Peers that should hold copies of these files of the newest commit, as far as the hub knows, by file name."""
        record = self._history.record(self.newest)
        return {file: [n for n in record.holders.get(file, ()) if n != HUB] if record else [] for file in files}

    def roll_back(self, step: int) -> None:
        """Makes an older step the newest: the files of later commits are lost for good. Their records stay until
        replaced."""
        self.newest, self._pending = step, None

    @property
    def complete(self) -> Commit | None:
        """The record of the pending checkpoint if it is complete, else None. The caller makes the commit durable, then
        calls `mark_committed`."""
        pending = self._pending
        if pending is None or pending.unannounced or not all(pending.holders.values()):
            return None
        before = self._history.sha256(pending.state.step)
        replaces = "" if before == pending.state.sha256 else before
        return Commit.of(pending.state, self.generation, pending.holders, replaces)

    def mark_committed(self, commit: Commit) -> None:
        """The commit is durable. A state that was committed before and lost by the hub keeps its old record."""
        if self._history.accepts(commit):  # else the old record stays
            self._history.add(commit)
        self.newest, self._pending = commit.step, None


class _PendingCheckpoint:
    """A checkpoint that peers are uploading."""

    def __init__(self, state: CommitState, manifest_sha256: str, names: Iterable[str], now: float) -> None:
        self.state, self.manifest_sha256, self.last_activity_at = state, manifest_sha256, now
        self.unannounced = set(names)
        """Peers that have not announced their part."""
        self.announced_files: dict[str, frozenset[str]] = {}
        """Files that each peer has announced, by peer name."""
        self.holders: dict[str, set[str]] = {file: set() for file in state.files}
        """Peers that have uploaded each file, by file name."""

    def unavailable_files(self, gone: Collection[str]) -> list[str]:
        """Files that the hub does not have and that no remaining peer has announced."""
        if self.unannounced:
            return []  # peers that have not announced yet may have the file
        present = [files for peer, files in self.announced_files.items() if peer not in gone]
        return [file for file, holders in self.holders.items() if not holders and not any(file in p for p in present)]

    def is_awaited(self, peer: str, now: float) -> bool:
        """True if this peer has announced its part while slower peers are still uploading. The newer checkpoint then
        has to wait; otherwise a peer with a slow uplink would never complete one."""
        return peer not in self.unannounced and now - self.last_activity_at < PENDING_IDLE_SECONDS
