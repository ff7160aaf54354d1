"""Names in a run's folder (`job.dump_folder`) and in a checkpoint's folder. Imports no torch."""

from pathlib import Path

MANIFEST = "manifest.json"
"""File of a checkpoint that describes it; a folder without one is no checkpoint."""


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
