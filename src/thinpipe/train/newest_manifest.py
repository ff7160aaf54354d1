"""Where the hub begins: at its newest commit, also when the folder of that is gone.

The manifest of the newest commit has a copy beside the checkpoints. With it peers can be asked for all the files; and
it tells a commit that was lost from one that was given up.
"""

from collections.abc import Collection
from pathlib import Path

import msgspec

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest
from thinpipe.checkpoint.folder import FORMAT_VERSION, step_folder
from thinpipe.core.errors import UserError
from thinpipe.core.files import write_atomically
from thinpipe.swarm.broker_config import HUB
from thinpipe.swarm.commit_history import Commit, History
from thinpipe.swarm.commit_log import COMMITS
from thinpipe.train.commit_record import state_of
from thinpipe.train.lost_files import put_back_manifest

NEWEST = "newest.json"


def find_newest(folder: CheckpointFolder, kept: Path, history: History) -> tuple[Checkpoint | None, list[str]]:
    """The newest commit, whole or not, and what is wrong with newer ones. None: there never was one. Raises UserError
    when none is left: nobody wants to begin anew without knowing."""
    newest, problems = folder.newest_whole(layers=())
    step = 0 if newest is None else newest.manifest.step
    copy = _read(kept)
    if copy is not None and copy.step > step and history.sha256(copy.step) == state_of(copy).sha256:
        return _put_back(folder, copy), [*problems, f"step {copy.step} has lost its manifest: put back from {kept}"]
    if newest is None and (problems or history.last is not None):
        raise UserError(
            f"no checkpoint is left in {folder.folder}, and the run is not begun anew by itself: put one back, or "
            "choose another job.dump_folder\n  " + "\n  ".join(problems)
        )
    last = history.last
    if last is not None and last.step > step and (copy is None or copy.step != step):
        problems.append(
            f"step {last.step} is in {COMMITS} but its checkpoint is gone (held by {', '.join(_holders(last))}): going "
            f"on from step {step}"
        )
    return newest, problems


def keep_manifest(kept: Path, manifest: Manifest) -> None:
    """Raises OSError, and leaves none: an older one would say that a newer commit was given up."""
    try:
        write_atomically(kept, msgspec.json.encode(manifest))
    except OSError:
        kept.unlink(missing_ok=True)
        raise


def _read(kept: Path) -> Manifest | None:
    try:
        found = msgspec.json.decode(kept.read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return found if found == found.sealed() and found.format_version == FORMAT_VERSION else None


def _put_back(folder: CheckpointFolder, manifest: Manifest) -> Checkpoint:
    lost = Checkpoint(folder.folder / step_folder(manifest.step), manifest)
    try:
        put_back_manifest(lost)
    except OSError as error:
        raise UserError(f"{lost.path} was lost and cannot be made again ({error.strerror}): put that right") from None
    return lost


def _holders(commit: Commit) -> Collection[str]:
    return sorted({name for names in commit.holders.values() for name in names if name != HUB}) or ["nobody known"]
