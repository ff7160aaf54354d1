"""What a state of the run is, and which were committed: all of it for the newest, of older ones a hash. Pure.

There is one commit of a step. Only when its files were lost for good may another take its place, which says so.
"""

from collections.abc import Iterable, Mapping

import msgspec

from thinpipe.core.digest import text_sha256
from thinpipe.swarm.broker_config import HUB


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the run is after a step, bit for bit."""

    step: int
    samples_seen: int
    """The cursor of the data."""
    basis_version: int | None
    basis_sha256: str | None
    files: dict[str, str]
    """sha256 of each."""

    @property
    def sha256(self) -> str:
        """Of all that is said above."""
        fields = {field: getattr(self, field) for field in State.__struct_fields__}
        return text_sha256(msgspec.json.encode(fields, order="deterministic").decode())


class Commit(State, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A state that is kept for good."""

    epoch: int
    """In which it was computed; 0: it was there before any."""
    holders: dict[str, list[str]]
    """Of each file, as far as the hub knows: peers of that epoch, and the hub."""
    replaces: str = ""
    """sha256 of the state that was committed for this step before, and whose files are lost."""

    @property
    def state(self) -> State:
        return State(**{field: getattr(self, field) for field in State.__struct_fields__})

    @classmethod
    def of(cls, state: State, epoch: int, holders: Mapping[str, Iterable[str]], replaces: str = "") -> "Commit":
        return cls(
            **msgspec.structs.asdict(state),
            epoch=epoch,
            holders={file: [*sorted(holders.get(file, ())), HUB] for file in state.files},
            replaces=replaces,
        )


class History:
    """`most`: so many records are kept as they are; 0: all."""

    def __init__(self, records: Iterable[Commit] = (), *, most: int = 0) -> None:
        self._most = most
        self._sha256: dict[int, str] = {}
        self._newest: dict[int, Commit] = {}
        """In the order of writing."""
        self.last: Commit | None = None
        """That was written."""
        for record in records:
            self.add(record)

    def sha256(self, step: int) -> str:
        """Of the state that is committed for this step; empty: none is."""
        return self._sha256.get(step, "")

    def record(self, step: int) -> Commit | None:
        """None: there is none, or it is too old."""
        return self._newest.get(step)

    def fits(self, commit: Commit) -> bool:
        """It is the first of its step, or knows which one it replaces."""
        return commit.replaces == self.sha256(commit.step)

    def add(self, commit: Commit) -> None:
        if not self.fits(commit):
            raise ValueError(f"step {commit.step} is committed already")
        self._sha256[commit.step], self.last = commit.sha256, commit
        self._newest.pop(commit.step, None)
        self._newest[commit.step] = commit
        if 0 < self._most < len(self._newest):
            del self._newest[next(iter(self._newest))]
