"""How a process that a launcher started tells it why it ended: a file, named in its environment."""

import msgspec

ERROR_FILE = "THINPIPE_ERROR_FILE"
"""Environment variable with the path of that file. Absent where no launcher reads it."""


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a process ended."""

    text: str
    user_error: bool
