"""What the ledger of commits keeps of a checkpoint, and how the hub finds both alike again after a crash."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, Manifest
from thinpipe.swarm.commit_history import Commit, State
from thinpipe.swarm.commit_log import COMMITS, CommitLog
from thinpipe.swarm.commits import Commits

COMMIT = "commit.json"
"""In the folder of a checkpoint: its line of the log, which a crash may keep from being written there."""


def state_of(manifest: Manifest) -> State:
    return State(
        step=manifest.step,
        samples_seen=manifest.samples_seen,
        basis_version=manifest.basis_version,
        basis_sha256=manifest.basis_sha256,
        files={file: entry.sha256 for file, entry in manifest.files.items()},
    )


def open_ledger(log: CommitLog, newest: Checkpoint, tell: Callable[[str], None]) -> Commits:
    """A whole checkpoint that the log does not have was committed just before a crash: it is written down now. The
    very first is no commit: no peer has computed it."""
    log.open()
    state = state_of(newest.manifest)
    known = log.history.sha256(state.step)
    if state.step and known != state.sha256:
        record = _record(newest.path / COMMIT, state) or Commit.of(state, 0, {})
        log.append(record := msgspec.structs.replace(record, replaces=known))
        if known:
            tell(say_replaced(record))
    return Commits(log.history, newest=state.step)


def say_replaced(commit: Commit) -> str:
    """For people, when its step was committed before with other contents."""
    return (
        f"step {commit.step} was committed before and its files were lost; computed again, perhaps on another kind of "
        f"processor, it has other contents: these are committed now, and {COMMITS} says so"
    )


def _record(path: Path, state: State) -> Commit | None:
    """What the checkpoint's folder has of its commit, if that is of this state."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Commit)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return found if found.state == state else None
