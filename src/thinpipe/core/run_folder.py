"""Names in a run's folder (`job.dump_folder`) and in a checkpoint's folder. Imports no torch."""

import difflib
from pathlib import Path

from thinpipe.core.errors import UserError

MANIFEST = "manifest.json"
"""File of a checkpoint that describes it; a folder without one is no checkpoint."""


IDENTITY = "identity.toml"
"""File of a folder that `thinpipe join` has made: who the machine is in the run."""


def refuse_missing_run(run: Path) -> None:
    """Raises UserError, with the nearest name beside it, if there is no such folder."""
    if run.exists():
        return
    missing = next(path for path in (*reversed(run.parents), run) if not path.exists())
    parent = missing.parent
    names = [each.name for each in parent.iterdir() if each.is_dir()] if parent.is_dir() else []
    nearest = difflib.get_close_matches(missing.name, names, n=1, cutoff=0.6)
    rest = run.relative_to(missing)
    advice = f"did you mean {parent / nearest[0] / rest}?" if nearest else "name the dump_folder of a run"
    raise UserError(f"there is no folder {run}: {advice}")


def events_path(run: Path) -> Path:
    """Event log of a run."""
    return run / "events.jsonl"


def settings_path(run: Path) -> Path:
    """Resolved settings of a run."""
    return run / "run.toml"


def hub_start_path(run: Path) -> Path:
    """Settings with which the run's hub was started last, those of the run among them."""
    return run / "hub" / "start.toml"


def checkpoints_path(run: Path) -> Path:
    """Folder of a run's checkpoints, or of a peer's part of them."""
    return run / "checkpoints"


def step_folder(step: int) -> str:
    """Folder name of the checkpoint of a step; names sort by step (up to 8 digits)."""
    return f"step-{step:08d}"


def step_folders(checkpoints: Path) -> list[Path]:
    """Folders of all checkpoints in the folder `checkpoints`, whole or not, newest first."""
    return sorted(checkpoints.glob("step-*"), reverse=True)
