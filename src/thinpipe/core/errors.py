"""The error for what a person can put right. Its message names the place and says what to do instead."""


class UserError(Exception):
    """Shown as one line, without a traceback, by every command. Anything else that escapes is a bug of ours.

    Not a ValueError: the command line's parser would take that for one of its own and reword it.
    """
