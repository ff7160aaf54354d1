"""Names of the broker's users: peers, invites and the hub."""

import re

from thinpipe.core.errors import UserError
from thinpipe.transport.nats.activity import HUB

__all__ = ["HUB", "JOIN", "check_name"]

JOIN = "join"
"""Service for holders of invites, who ask it on `join.<id of the invite>`."""

_NAME = re.compile(r"[a-z0-9]{1,32}", re.ASCII)


def check_name(name: str) -> None:
    """Raises UserError if the text is not a valid name of a peer or an invite."""
    if not _NAME.fullmatch(name) or name == HUB:
        raise UserError(
            f"{name[:80]!r} is not a valid name: use 1 to 32 lower-case letters a-z and digits, but not {HUB!r}"
        )
