"""Records of committed states: complete records of the newest steps, only a hash of older ones. Pure.

A step is committed once. Only when the files of a commit were lost for good may another one replace it, and its record
then names the replaced one.
"""

from collections.abc import Iterable, Mapping

import msgspec

from thinpipe.core.hashing import text_sha256
from thinpipe.swarm.protocol.names import HUB


class CommitState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bit-exact description of the training state after a step."""

    step: int
    samples_seen: int
    """Number of training samples consumed: the position in the data."""
    basis_version: int | None
    """Version of the subspace basis; None: the model has none."""
    basis_sha256: str | None
    files: dict[str, str]
    """sha256 of each checkpoint file, by file name."""

    @property
    def sha256(self) -> str:
        """Hash of all fields of the state."""
        fields = {field: getattr(self, field) for field in CommitState.__struct_fields__}
        return text_sha256(msgspec.json.encode(fields, order="deterministic").decode())


class Commit(CommitState, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Record of a committed state."""

    generation: int
    """Generation that computed the state; 0: unknown, or from before any generation."""
    holders: dict[str, list[str]]
    """Known holders of each file, by file name: peers of the generation, and the hub."""
    replaces: str = ""
    """sha256 of the state that was committed for this step before and whose files are lost; empty: none."""

    @property
    def state(self) -> CommitState:
        return CommitState(**{field: getattr(self, field) for field in CommitState.__struct_fields__})

    @classmethod
    def of(
        cls, state: CommitState, generation: int, holders: Mapping[str, Iterable[str]], replaces: str = ""
    ) -> "Commit":
        """The record of a state; the hub is added to the holders of every file."""
        return cls(
            **msgspec.structs.asdict(state),
            generation=generation,
            holders={file: [*sorted(holders.get(file, ())), HUB] for file in state.files},
            replaces=replaces,
        )


class CommitHistory:
    """Commits by step. `max_records`: number of complete records to keep; 0: all. Hashes are kept of all steps."""

    def __init__(self, records: Iterable[Commit] = (), *, max_records: int = 0) -> None:
        self._max_records = max_records
        self._sha256: dict[int, str] = {}
        self._newest: dict[int, Commit] = {}
        """Complete records by step, in the order of writing."""
        self.last: Commit | None = None
        """The record written last; None: none yet."""
        for record in records:
            self.add(record)

    def sha256(self, step: int) -> str:
        """Hash of the state that is committed for this step; empty: none is."""
        return self._sha256.get(step, "")

    def record(self, step: int) -> Commit | None:
        """Complete record of this step; None: the step is not committed, or its record is no longer kept."""
        return self._newest.get(step)

    def accepts(self, commit: Commit) -> bool:
        """True if the commit is the first of its step, or names the one that it replaces."""
        return commit.replaces == self.sha256(commit.step)

    def add(self, commit: Commit) -> None:
        """Adds a commit. Raises ValueError unless `accepts` is true for it."""
        if not self.accepts(commit):
            raise ValueError(f"step {commit.step} is committed already")
        self._sha256[commit.step], self.last = commit.sha256, commit
        self._newest.pop(commit.step, None)
        self._newest[commit.step] = commit
        if 0 < self._max_records < len(self._newest):
            del self._newest[next(iter(self._newest))]
