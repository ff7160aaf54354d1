"""Finds the newest commit when the hub starts, even if its checkpoint folder was lost.

A copy of the newest commit's manifest is stored outside the checkpoint folders. With the copy the hub can ask peers for
all files, and can distinguish a lost commit from one that was rolled back.
"""

from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest
from thinpipe.checkpoint.storage import FORMAT_VERSION
from thinpipe.core.errors import DECODE_ERRORS, UserError
from thinpipe.core.files import write_atomically
from thinpipe.core.run_folder import step_folder
from thinpipe.swarm.hub.commits.history import Commit, CommitHistory, CommitState
from thinpipe.swarm.hub.commits.ledger import CommitLedger
from thinpipe.swarm.hub.commits.log import COMMIT_LOG_FILE, CommitLog
from thinpipe.swarm.hub.commits.lost_files import restore_manifest
from thinpipe.swarm.protocol.names import HUB
from thinpipe.swarm.protocol.signed_files import COMMIT_FILE, Maker

NEWEST_MANIFEST_FILE = "newest_manifest.json"


def find_newest(
    folder: CheckpointFolder, copy_path: Path, history: CommitHistory
) -> tuple[Checkpoint | None, list[str]]:
    """The newest commit, complete or not, and descriptions of problems with newer ones. None: the run has no checkpoint
    yet. Raises UserError when commits exist but no checkpoint is left: a run is not silently started over."""
    newest, problems = folder.newest_complete(layers=())
    step = 0 if newest is None else newest.manifest.step
    copy = _read(copy_path)
    if copy is not None and copy.step > step and history.sha256(copy.step) == state_of(copy).sha256:
        return _restore(folder, copy), [
            *problems,
            f"the manifest of step {copy.step} was lost, and is restored from {copy_path}",
        ]
    if newest is None and (problems or history.last is not None):
        raise UserError(
            f"no complete checkpoint is left in {folder.folder}: restore one from a backup, or choose another "
            "job.dump_folder to start a new run\n  " + "\n  ".join(problems)
        )
    last = history.last
    if last is not None and last.step > step and (copy is None or copy.step != step):
        problems.append(
            f"step {last.step} is in {COMMIT_LOG_FILE}, but its checkpoint is missing (copies at "
            f"{', '.join(_holders(last))}): continuing from step {step}"
        )
    return newest, problems


def save_newest_manifest(copy_path: Path, manifest: Manifest) -> None:
    """Writes the copy of the manifest. On OSError removes the copy and raises: an outdated copy would mean that the
    newer commit was rolled back."""
    try:
        write_atomically(copy_path, msgspec.json.encode(manifest))
    except OSError:
        copy_path.unlink(missing_ok=True)
        raise


def _read(copy_path: Path) -> Manifest | None:
    """The copy of the manifest; None if it is missing, damaged or of another format version."""
    try:
        found = msgspec.json.decode(copy_path.read_bytes(), type=Manifest)
    except (FileNotFoundError, *DECODE_ERRORS):
        return None
    return found if found == found.with_checksum() and found.format_version == FORMAT_VERSION else None


def _restore(folder: CheckpointFolder, manifest: Manifest) -> Checkpoint:
    """Recreates folder and manifest of a lost checkpoint."""
    lost = Checkpoint(folder.folder / step_folder(manifest.step), manifest)
    try:
        restore_manifest(lost)
    except OSError as error:
        raise UserError(
            f"{lost.path} was lost, and its manifest cannot be written ({error.strerror}): check the disk, then start "
            "the hub again"
        ) from None
    return lost


def _holders(commit: Commit) -> Collection[str]:
    return sorted({name for names in commit.holders.values() for name in names if name != HUB}) or ["no known peer"]


class SignedCommit(Commit, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Contents of `COMMIT_FILE`: the record of a commit, in case a crash prevents the append to the commit log, and
    what shows who made its files. The commit log has the record alone."""

    makers: dict[str, Maker] = msgspec.field(default_factory=dict)
    """Maker of each file, by file name; empty in checkpoints of earlier versions."""

    def without_makers(self) -> Commit:
        return Commit(**{field: getattr(self, field) for field in Commit.__struct_fields__})


def state_of(manifest: Manifest) -> CommitState:
    """The state that a manifest describes."""
    return CommitState(
        step=manifest.step,
        samples_seen=manifest.samples_seen,
        basis_version=manifest.basis_version,
        basis_sha256=manifest.basis_sha256,
        files={file: entry.sha256 for file, entry in manifest.files.items()},
    )


def open_ledger(log: CommitLog, newest: Checkpoint, print_line: Callable[[str], None]) -> CommitLedger:
    """Opens the commit log and returns the ledger. A complete checkpoint that is not in the log was written just before
    a crash: its record is appended now. The checkpoint of step 0 is not a commit: no peer computed it."""
    log.open()
    state = state_of(newest.manifest)
    known = log.history.sha256(state.step)
    if state.step and known != state.sha256:
        record = _record(newest.path / COMMIT_FILE, state) or Commit.of(state, 0, {})
        log.append(record := msgspec.structs.replace(record, replaces=known))
        if known:
            print_line(describe_replacement(record))
    return CommitLedger(log.history, newest=state.step)


def describe_replacement(commit: Commit) -> str:
    """Message for people when a step is committed a second time with other contents."""
    return (
        f"step {commit.step} was committed before, its files were lost, and computing it again gave other contents, "
        f"perhaps on another kind of processor: these are committed now, and {COMMIT_LOG_FILE} records the replacement"
    )


def _record(path: Path, state: CommitState) -> Commit | None:
    """The commit record in the checkpoint folder, if it describes this state."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=SignedCommit)
    except (FileNotFoundError, *DECODE_ERRORS):
        return None
    return found.without_makers() if found.state == state else None
