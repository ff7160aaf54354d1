"""What the ledger of commits keeps of a checkpoint, and how the hub finds both alike again after a crash."""

from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, Manifest
from thinpipe.swarm.commit_log import CommitLog
from thinpipe.swarm.commits import Commit, Commits, State

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


def open_ledger(log: CommitLog, newest: Checkpoint) -> Commits:
    """A whole checkpoint that is newer than the log was committed just before a crash: it is written down now. The
    very first is no commit: no peer has computed it."""
    state = state_of(newest.manifest)
    if state.step and state.step not in {record.step for record in log.records}:
        log.append(_record(newest.path / COMMIT, state) or Commit.of(state, 0, {}))
    return Commits(log.records, newest=state.step)


def _record(path: Path, state: State) -> Commit | None:
    """What the checkpoint's folder has of its commit, if that is of this state."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Commit)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return found if found.state == state else None
