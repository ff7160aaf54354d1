"""Error file by which a process reports to its local launcher why it failed."""

import msgspec

ERROR_FILE_VARIABLE = "THINPIPE_ERROR_FILE"
"""Environment variable with the path of the error file. Set only by the local launcher, not under `torchrun`."""


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the error file (JSON)."""

    text: str
    """Message for the user."""
    user_error: bool
    """True for wrong settings or input (exit code 2), False for any other failure (exit code 1)."""
    in_other_process: bool = False
    """True if another process of the run has the problem and reports it too."""
