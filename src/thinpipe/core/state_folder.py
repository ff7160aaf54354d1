"""The user's folder for what thinpipe finds out about this machine: calibrations and results of probes."""

import os
import platform
from pathlib import Path

STATE_FOLDER_VARIABLE = "THINPIPE_STATE_FOLDER"
"""Environment variable with the folder that is used in place of the system's folder for programs' state."""


def state_folder() -> Path:
    """The user's folder for state of programs, by the custom of the system."""
    named = os.environ.get(STATE_FOLDER_VARIABLE)
    if named:
        return Path(named)
    if platform.system() == "Windows":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "thinpipe"
    if platform.system() == "Darwin":
        return Path.home() / "Library" / "Application Support" / "thinpipe"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "thinpipe"
