"""Errors that a user can fix. The message names the place of the error and says what to do instead."""


class UserError(Exception):
    """An error that a user can fix. Every command prints it as one line without a traceback; any other exception that
    reaches the command line is a bug in thinpipe.

    Not a ValueError: tyro, the command-line parser, would catch that and print a message of its own.
    """


class DataError(UserError):
    """Invalid text or token files, or invalid settings of `thinpipe tokenize`. The message names the file."""
