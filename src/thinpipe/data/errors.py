"""One error for everything that is wrong with text or token files: it names the place and says what to do."""

from thinpipe.core.errors import UserError


class DataError(UserError):
    """The message is meant for the person who started the command; a traceback adds nothing to it."""
