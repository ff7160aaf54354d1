"""Text of an invite for the hub's owner: what to send to one person, who need not know what a package is."""

from thinpipe.core.install import NEEDS, install_and_join
from thinpipe.core.units import utc_text
from thinpipe.swarm.protocol.invite import Invite


def invite_text(invite: Invite, title: str = "invite") -> str:
    """`title`: what this invite is, such as "invite 2 of 3". The invite stands in a line of its own, for machines with
    thinpipe, and in one line for each system that installs thinpipe first."""
    line = invite.line()
    return "\n".join(
        (
            f"{title} ({invite.id}), for one person, secret like a password, usable until {utc_text(invite.expires)}:",
            line,
            f"or, for somebody without thinpipe, one line for a new terminal (needs {NEEDS}):",
            *(f"  {system}: {command}" for system, command in install_and_join(line).items()),
        )
    )
