"""Errors that a user can fix, and their counterpart in the other processes of the run. The message of a UserError names
the place of the error and says what to do instead."""

import msgspec

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions of msgspec decoders for damaged or hostile data: wrong type or malformed data, invalid UTF-8, too deeply
nested lists."""


class UserError(Exception):
    """An error that a user can fix. Every command prints it as one line without a traceback; any other exception that
    reaches the command line is a bug in thinpipe.

    Not a ValueError: tyro, the command-line parser, would catch that and print a message of its own.
    """


class RunFailedError(Exception):
    """A run that several processes compute failed. The message names the process and its problem; the newest checkpoint
    is whole, so the same call resumes the run.

    `reported`: the process has already reported the error, to its launcher or on stderr. `user_error`: it was an error
    that a user can fix.
    """

    def __init__(self, message: str, *, reported: bool = False, user_error: bool = False) -> None:
        super().__init__(message)
        self.reported, self.user_error = reported, user_error


class OtherProcessError(ConnectionError):
    """Another process of the run has a problem and raises it itself; the message names that process. A ConnectionError,
    because this process can continue without the other one: a peer of a hub's run joins the next generation."""


class DataError(UserError):
    """Invalid text or token files, or invalid settings of `thinpipe tokenize`. The message names the file."""


def first_cause(error: BaseException) -> BaseException:
    """The error with which it began, without what was going on meanwhile."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
