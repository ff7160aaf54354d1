"""Tries the address of the hub's invites from this machine, once, and tells the hub and the user how that went."""

import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from thinpipe.config.hub import JoinConfig
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.broker.server import fingerprint_at
from thinpipe.swarm.peer.identity import Identity
from thinpipe.swarm.protocol.invite import Invite
from thinpipe.swarm.protocol.messages import ReachReply, ReachRequest
from thinpipe.transport.nats.connection import HubConnection

_SECONDS = 5.0


def tell_reach(
    connection: HubConnection, identity: Identity, config: JoinConfig, print_line: Callable[[str], None]
) -> None:
    """Nothing is tried if the connection itself came by the address of the invite. A hub that does not know the
    question, or does not answer in time, changes nothing."""
    promised = Invite.read(config.invite).url if Invite.is_invite(config.invite) else identity.url
    request = ReachRequest(address=urlsplit(promised).netloc)
    if promised != identity.url:
        print_line(f"trying whether {request.address}, the address in the invites, can be reached from here")
        request = try_address(promised, identity.fingerprint)
    try:
        reply = connection.request("reach", msgspec.msgpack.encode(request), seconds=_SECONDS)
        text = decode_foreign(reply, ReachReply).text
    except (ConnectionError, TimeoutError, ProtocolError):
        return
    if text:
        print_line(text)


def try_address(url: str, fingerprint: str) -> ReachRequest:
    """Connects to a hub's address to see whether the hub's certificate is there; sends nothing."""
    parts = urlsplit(url)
    try:
        shown = fingerprint_at((parts.hostname or "", parts.port or 0), seconds=_SECONDS)
    except ssl.SSLError:
        return ReachRequest(address=parts.netloc, outcome="another_certificate")
    except OSError as error:
        return ReachRequest(address=parts.netloc, outcome="unreachable", error=str(error)[:200])
    return ReachRequest(address=parts.netloc, outcome="reached" if shown == fingerprint else "another_certificate")
