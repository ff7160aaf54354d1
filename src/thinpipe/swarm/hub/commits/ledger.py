"""The commit ledger: decides when an uploaded checkpoint becomes a commit. Pure.

A file belongs to the peer that holds its layer in the generation; only `run` is held by all. The state after a step is
put together from what every peer announces of its own files, and is committed when all have announced it, agree on
what they share, and the hub has every file from its sender: every layer then has two holders. A step is committed once.
A repeated announcement is accepted; a differing one is refused, as is one that is older than the newest commit or comes
from a generation that is over. Only a commit whose files were lost for good, so that its step is computed again, may be
replaced by other contents, since other hardware may compute other bits.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from thinpipe.core.errors import UserError
from thinpipe.core.units import format_names
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory, CommitState
from thinpipe.swarm.protocol.names import HUB
from thinpipe.swarm.protocol.signed_files import SignedFile

AnnounceReply = Literal["begin", "send", "retry", "committed"]
"""Reply to an announcement: upload your files, as the last peer to announce this checkpoint ("begin") or an earlier one
("send"); announce again in a moment ("retry"); or the checkpoint is already "committed"."""
_MAX_NAMED = 5
"""Files of a peer that are named to people: a status holds a few thousand characters."""


class FalsePartError(UserError):
    """A peer has announced what no honest peer does."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a peer has saved of a checkpoint, as it has announced it."""

    step: int
    samples_seen: int
    basis_version: int | None
    basis_sha256: str | None
    files: Mapping[str, SignedFile]
    """The files of its layers, by name."""

    def shares(self, names: Collection[str]) -> tuple[object, ...]:
        """What must be the same at all peers. `names`: files that all peers have."""
        hashes = sorted((name, file.sha256) for name, file in self.files.items() if name in names)
        return self.samples_seen, self.basis_version, self.basis_sha256, tuple(hashes)


class CommitLedger:
    """The newest commit and the pending checkpoint.

    `history`: all commits, including those from before a restart of the hub. `newest`: step of the newest commit whose
    files the hub has.
    """

    def __init__(self, history: CommitHistory | None = None, *, newest: int = 0) -> None:
        self._history = CommitHistory() if history is None else history
        self.newest, self.generation = newest, 0
        self._held: dict[str, frozenset[str]] = {}
        """Files that each peer of the generation holds, by peer, in pipeline order."""
        self._gone: set[str] = set()
        """Peers that have left the generation."""
        self._parts: dict[str, Part] = {}
        """The newest announcement of each peer of the generation."""
        self._pending: _PendingCheckpoint | None = None
        """The checkpoint that peers are uploading, if any."""
        self._abandoned: tuple[frozenset[str], str] | None = None
        """See `pop_abandoned`."""

    def is_recorded(self, commit: Commit) -> bool:
        """True if this exact state was committed before; the hub had then lost its files."""
        return self._history.sha256(commit.step) == commit.sha256

    @property
    def pending_step(self) -> int | None:
        """Step of the checkpoint that peers are uploading; None: there is none."""
        return None if self._pending is None else self._pending.state.step

    def begin(self, generation: int, held: Mapping[str, Collection[str]]) -> None:
        """A generation begins from the newest commit: a pending checkpoint is given up. `held`: the files of the layers
        of each peer, in pipeline order."""
        if generation <= self.generation:
            raise ValueError(f"generation {generation} cannot follow generation {self.generation}")
        self.generation, self._held = generation, {name: frozenset(files) for name, files in held.items()}
        self._pending, self._parts = None, {}
        self._gone.clear()

    def foreign_files(self, peer: str, files: Iterable[str]) -> dict[str, list[str]]:
        """Those of the files that this peer does not hold: the peers that do, by file; empty if no peer does."""
        own = self._held.get(peer, frozenset())
        return {file: [name for name in self._held if file in self._held[name]] for file in files if file not in own}

    def announce(self, peer: str, generation: int, part: Part, now: float) -> AnnounceReply:
        """A peer has saved its part of a checkpoint. Raises UserError if the announcement is refused."""
        self._refuse(peer, generation, part)
        if part.step == self.newest:
            return "committed"
        known = self._parts.get(peer)
        if known is not None and known.step == part.step and known != part:
            raise FalsePartError(f"{peer} has announced step {part.step} before, with other contents")
        self._parts[peer] = part
        if part.step == self.pending_step:
            return "send"
        if self._pending is not None and not self._is_left_behind(self._pending):
            return "retry"
        if any(name not in self._parts or self._parts[name].step != part.step for name in self._held):
            return "retry"
        if self._pending is not None:
            self._give_up(self._pending, self._held)
        self._pending = self._pending_checkpoint(now)
        return "begin"

    def _refuse(self, peer: str, generation: int, part: Part) -> None:
        """Raises UserError if the announcement cannot become a commit."""
        step = part.step
        if generation != self.generation or peer not in self._held:
            raise UserError("the checkpoint is not of the current generation")
        missing = sorted(self._held[peer] - part.files.keys())
        if missing or self.foreign_files(peer, part.files):
            raise FalsePartError(f"{peer} leaves out {missing[0]}" if missing else f"{peer} announces files of others")
        if step < self.newest:
            raise UserError(f"there is a newer checkpoint, of step {self.newest}")
        if step not in (self.newest, self.pending_step) and self._gone:
            raise UserError(f"{', '.join(sorted(self._gone))} left before uploading its part of step {step}")
        if step == self.newest and not self._is_committed(part):
            raise UserError(f"step {step} is already committed with different contents, and commits do not change")

    def _is_committed(self, part: Part) -> bool:
        """True if the newest commit has these contents, or if its record is not known."""
        record = self._history.record(self.newest)
        return record is None or (
            (record.samples_seen, record.basis_version, record.basis_sha256)
            == (part.samples_seen, part.basis_version, part.basis_sha256)
            and all(record.files.get(name) == file.sha256 for name, file in part.files.items())
        )

    def _is_left_behind(self, pending: "_PendingCheckpoint") -> bool:
        """True if all peers that are there have announced a newer checkpoint: nobody uploads this one any more."""
        present = [name for name in self._held if name not in self._gone]
        return all(name in self._parts and self._parts[name].step > pending.state.step for name in present)

    def _pending_checkpoint(self, now: float) -> "_PendingCheckpoint":
        """The checkpoint that all peers have announced. Raises UserError if they do not agree."""
        if disagreement := self._disagreement():
            raise UserError(disagreement)
        part = next(iter(self._parts.values()))
        files = {name: file for each in self._parts.values() for name, file in each.files.items()}
        state = CommitState(
            step=part.step,
            samples_seen=part.samples_seen,
            basis_version=part.basis_version,
            basis_sha256=part.basis_sha256,
            files={name: files[name].sha256 for name in sorted(files)},
        )
        return _PendingCheckpoint(state, dict(self._parts), now)

    def _disagreement(self) -> str:
        """Peers that announce other shared contents of one step than others, in words; empty: there are none."""
        common = frozenset.intersection(*self._held.values()) if self._held else frozenset()
        groups: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, part in self._parts.items():
            groups[part.step, *part.shares(common)].append(name)
        if len(groups) < 2 or len({key[0] for key in groups}) > 1:
            return ""
        smaller, *others = sorted(groups.values(), key=len)
        rest = [name for group in others for name in group]
        step = next(iter(self._parts.values())).step
        return (
            f"{' and '.join(smaller)} announced another basis, data position or run file of step {step} than "
            f"{' and '.join(rest)}"
        )

    def drop_peer(self, peer: str) -> None:
        """The peer is gone and will announce and upload nothing more: a pending checkpoint that cannot become complete
        without it is given up."""
        if peer not in self._held:
            return
        self._gone.add(peer)
        pending = self._pending
        if pending is not None and any(not self._sender(file) for file in pending.missing):
            self._pending = None

    def _sender(self, file: str) -> str:
        """The peer that uploads this file: of its holders that are there the first; empty: there is none."""
        return next((name for name, files in self._held.items() if file in files and name not in self._gone), "")

    def wanted(self, peer: str, step: int) -> list[str]:
        """Files of the pending checkpoint that this peer is to upload."""
        if step != self.pending_step or self._pending is None:
            return []
        return [file for file in self._pending.missing if self._sender(file) == peer]

    def expected(self, peer: str, step: int, file: str) -> SignedFile | None:
        """The file as announced, if it is this peer that uploads it; None: it is not expected from this peer."""
        if step != self.pending_step or self._pending is None or self._sender(file) != peer:
            return None
        return self._pending.parts[peer].files.get(file)

    def on_file_received(self, peer: str, step: int, file: str) -> None:
        """The hub has this file with the right hash."""
        if self._pending is not None and self.expected(peer, step, file) is not None:
            self._pending.missing.pop(file, None)
            self._pending.uploaded[file] = peer

    def abandon_pending(self) -> None:
        """Gives up the pending checkpoint, which cannot be stored."""
        self._pending, self._parts = None, {}

    def abandon_overdue(self, now: float, seconds: Mapping[str, float], default: float) -> None:
        """Gives up the pending checkpoint if a peer has had more than its `seconds` to upload its files."""
        pending = self._pending
        if pending is None:
            return
        late = {name for name in map(self._sender, pending.missing) if now - pending.began > seconds.get(name, default)}
        if late:
            self._give_up(pending, late)
            self._pending = None
            self._parts = {name: part for name, part in self._parts.items() if name not in late}

    def _give_up(self, pending: "_PendingCheckpoint", names: Collection[str]) -> None:
        owing = frozenset(map(self._sender, pending.missing)).intersection(names)
        self._abandoned = owing, self._not_uploaded(pending, [name for name in self._held if name in owing])

    def pop_abandoned(self) -> tuple[frozenset[str], str] | None:
        """The peers that had announced files of a checkpoint and did not upload them, until it was given up, and what
        they owe, in words. Returned once."""
        abandoned, self._abandoned = self._abandoned, None
        return abandoned

    def owed(self) -> str:
        """What the next commit waits for, and whom, in words."""
        pending = self._pending
        if pending is not None:
            return self._not_uploaded(pending, self._held)
        if not self._parts:
            return "the peers do not save: none has announced a checkpoint"
        if disagreement := self._disagreement():
            return disagreement
        announced = [f"{name} step {self._parts[name].step}" for name in self._held if name in self._parts]
        silent = [name for name in self._held if name not in self._parts]
        texts = [f"announced so far: {', '.join(announced)}"]
        return "; ".join(texts + ([f"nothing by {', '.join(silent)}"] if silent else []))

    def _not_uploaded(self, pending: "_PendingCheckpoint", names: Collection[str]) -> str:
        texts = []
        for name in names:
            files = [file for file in pending.missing if self._sender(file) == name]
            if files:
                shown = format_names(files, _MAX_NAMED)
                texts.append(f"{name} has not uploaded {shown} of step {pending.state.step}")
        return "; ".join(texts) or f"all files of step {pending.state.step} have arrived"

    def holders_of(self, files: Collection[str]) -> dict[str, list[str]]:
        """Peers that should hold copies of these files of the newest commit, as far as the hub knows, by file name."""
        record = self._history.record(self.newest)
        return {file: [n for n in record.holders.get(file, ()) if n != HUB] if record else [] for file in files}

    def roll_back(self, step: int) -> None:
        """Makes an older step the newest: the files of later commits are lost for good. Their records stay until
        replaced."""
        self.newest, self._pending = step, None

    @property
    def signed_files(self) -> dict[str, tuple[str, SignedFile]]:
        """Who has uploaded each file of the pending checkpoint so far, and the file as that peer has announced it."""
        if (pending := self._pending) is None:
            return {}
        return {file: (peer, pending.parts[peer].files[file]) for file, peer in sorted(pending.uploaded.items())}

    @property
    def pending_since(self) -> float:
        """When all peers had announced the pending checkpoint."""
        return inf if self._pending is None else self._pending.began

    @property
    def complete(self) -> Commit | None:
        """The record of the pending checkpoint if it is complete, else None. The caller makes the commit durable, then
        calls `mark_committed`."""
        pending = self._pending
        if pending is None or pending.missing:
            return None
        holders = {file: [name for name in self._held if file in self._held[name]] for file in pending.state.files}
        before = self._history.sha256(pending.state.step)
        replaces = "" if before == pending.state.sha256 else before
        return Commit.of(pending.state, self.generation, holders, replaces)

    def mark_committed(self, commit: Commit) -> None:
        """The commit is durable. A state that was committed before and lost by the hub keeps its old record."""
        if self._history.accepts(commit):  # else the old record stays
            self._history.add(commit)
        self.newest, self._pending = commit.step, None


class _PendingCheckpoint:
    """A checkpoint that all peers have announced and are uploading."""

    def __init__(self, state: CommitState, parts: Mapping[str, Part], now: float) -> None:
        self.state, self.parts, self.began = state, parts, now
        self.missing = dict.fromkeys(state.files)
        """Files that the hub does not have, in the order of their names."""
        self.uploaded: dict[str, str] = {}
        """Peer that has uploaded each file."""
