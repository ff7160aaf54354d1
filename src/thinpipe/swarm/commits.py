"""The ledger of commits: which states of the run are kept for good, and what is on its way to become one. Pure.

A state after step s is committed when every peer of the epoch has told the same description of it, so that each holds
its own part, and the hub has every file with the hash that the description names: then every layer has two holders.
There is one commit of a step. What is told again is already there, what differs is refused; so is what is older than
the newest, and what peers of an epoch that is over tell. Only of a commit whose files were lost for good, so that it is
computed again, may the contents be others: what computes now may be another kind of processor.
"""

from collections.abc import Collection, Iterable
from typing import Literal

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker_config import HUB
from thinpipe.swarm.commit_history import Commit, History, State

QUIET_SECONDS = 30.0
"""A checkpoint of which nothing came for so long gives way to a newer one."""

Told = Literal["begin", "send", "later", "there"]
"""To a peer that tells a description: send your files, they are the first of this checkpoint or follow others; ask
again in a moment; it is committed."""


class Commits:
    """`history`: also of earlier lives of the hub. `newest`: the step of the newest that the hub has the files of."""

    def __init__(self, history: History | None = None, *, newest: int = 0) -> None:
        self._history = History() if history is None else history
        self.newest, self.epoch = newest, 0
        self._names: frozenset[str] = frozenset()
        self._gone: set[str] = set()
        """Of the epoch, who has left it."""
        self._arriving: _Arriving | None = None

    def is_known(self, commit: Commit) -> bool:
        """This very state was committed before: the hub had lost its files."""
        return self._history.sha256(commit.step) == commit.sha256

    @property
    def arriving(self) -> int | None:
        """The step of the checkpoint whose files are on their way."""
        return None if self._arriving is None else self._arriving.state.step

    def begin(self, epoch: int, names: Collection[str]) -> None:
        """An epoch begins from the newest: what was on its way is given up."""
        if epoch <= self.epoch:
            raise ValueError(f"epoch {epoch} cannot follow epoch {self.epoch}")
        self.epoch, self._names, self._arriving = epoch, frozenset(names), None
        self._gone.clear()

    def told(self, peer: str, epoch: int, state: State, files: Collection[str], seal: str, now: float) -> Told:
        """A peer has its part of this, which is these files. `seal`: the hash of all that was told. Raises UserError if
        it is refused."""
        self._refuse(peer, epoch, state)
        if state.step == self.newest:
            return "there"
        arriving = self._arriving
        begins = arriving is None or state.step > arriving.state.step
        if arriving is None or begins:
            if arriving is not None and arriving.is_awaited(peer, now):
                return "later"
            arriving = self._arriving = _Arriving(state, seal, self._names, now)
        if (state, seal) != (arriving.state, arriving.seal):
            raise UserError(f"another peer has told another checkpoint of step {arriving.state.step}")
        arriving.to_tell.discard(peer)
        arriving.promised[peer] = frozenset(files)
        if lacking := arriving.will_not_come(self._gone):
            self._arriving = None
            raise UserError(f"nobody who is there has {lacking[0]} of step {state.step}")
        return "begin" if begins else "send"

    def _refuse(self, peer: str, epoch: int, state: State) -> None:
        if epoch != self.epoch or peer not in self._names:
            raise UserError("it is not of this epoch")
        if state.step < self.newest:
            raise UserError(f"there is a newer checkpoint, of step {self.newest}")
        if state.step not in (self.newest, self.arriving) and self._gone & self._names:
            raise UserError(f"{', '.join(sorted(self._gone & self._names))} is gone, and its part with it")
        if state.step == self.newest and self._history.sha256(state.step) not in ("", state.sha256):
            raise UserError(
                f"step {state.step} is committed with other contents, and what is committed does not change"
            )

    def gone(self, peer: str) -> None:
        """What it has not told or sent by now it never will: what cannot become whole is given up."""
        self._gone.add(peer)
        arriving = self._arriving
        if arriving is not None and (peer in arriving.to_tell or arriving.will_not_come(self._gone)):
            self._arriving = None

    def expects(self, peer: str, step: int, file: str, now: float) -> bool:
        """Whether this peer is to send this file now: it has told that it has its part."""
        arriving = self._arriving
        if arriving is None or step != arriving.state.step or file not in arriving.state.files:
            return False
        if peer not in self._names or peer in arriving.to_tell:
            return False
        arriving.last_heard = now
        return True

    def came(self, peer: str, step: int, file: str) -> None:
        """The hub has this file, with the right hash, and so has the peer who sent it."""
        arriving = self._arriving
        if arriving is None or step != arriving.state.step or peer not in self._names or peer in arriving.to_tell:
            return
        if file in arriving.holders:
            arriving.holders[file].add(peer)

    def give_up(self) -> None:
        """What is on its way cannot be kept."""
        self._arriving = None

    def peers_with(self, files: Collection[str]) -> dict[str, list[str]]:
        """Who else should have these files of the newest, as far as the hub knows."""
        record = self._history.record(self.newest)
        return {file: [n for n in record.holders.get(file, ()) if n != HUB] if record else [] for file in files}

    def fall_back(self, step: int) -> None:
        """The files of all that is newer are lost for good; the records stay until others replace them."""
        self.newest, self._arriving = step, None

    @property
    def whole(self) -> Commit | None:
        """What can be committed now: make it durable, then call `committed`."""
        arriving = self._arriving
        if arriving is None or arriving.to_tell or not all(arriving.holders.values()):
            return None
        before = self._history.sha256(arriving.state.step)
        replaces = "" if before == arriving.state.sha256 else before
        return Commit.of(arriving.state, self.epoch, arriving.holders, replaces)

    def committed(self, commit: Commit) -> None:
        """It is durable. One that the hub had lost the files of keeps its record."""
        if self._history.fits(commit):  # else it is written already
            self._history.add(commit)
        self.newest, self._arriving = commit.step, None


class _Arriving:
    """A checkpoint whose files are on their way."""

    def __init__(self, state: State, seal: str, names: Iterable[str], now: float) -> None:
        self.state, self.seal, self.last_heard = state, seal, now
        self.to_tell = set(names)
        self.promised: dict[str, frozenset[str]] = {}
        """What each has told that it sends."""
        self.holders: dict[str, set[str]] = {file: set() for file in state.files}

    def will_not_come(self, gone: Collection[str]) -> list[str]:
        """Files that are not here, and that nobody but those who are gone has."""
        if self.to_tell:
            return []  # they may have it
        present = [files for peer, files in self.promised.items() if peer not in gone]
        return [file for file, holders in self.holders.items() if not holders and not any(file in p for p in present)]

    def is_awaited(self, peer: str, now: float) -> bool:
        """Somebody's line is slower than that of this peer, which has done its part. Without waiting, a slow line
        would never get a checkpoint through before the next one comes."""
        return peer not in self.to_tell and now - self.last_heard < QUIET_SECONDS
