"""Renews a peer's JWT: every day while it works, beside its connections, and when it signs in after the JWT has
expired.

No clock of this machine has a part: a peer renews when it connects and after a day of running. A connection goes on
with the JWT with which it signed in; the new one is for the next.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nats.errors import Error as NatsError

from thinpipe.core.errors import UserError
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.peer.clock import wrong_clock_text
from thinpipe.swarm.peer.identity import Identity, save_jwt
from thinpipe.swarm.protocol.messages import RenewReply
from thinpipe.swarm.protocol.names import HUB
from thinpipe.transport.nats.client import RefusedKeyError, UnreachableError, connect
from thinpipe.transport.nats.connection import HubConnection

SERVICE = "renew"
RENEW_SECONDS = 86400.0
"""Seconds between two renewals of a peer that works; far below the time for which a JWT is valid."""
_RETRY_SECONDS = 600.0
"""Seconds after which a renewal that failed is tried again."""
_ANSWER_SECONDS = 30.0
_LOG = logging.getLogger(__name__)


def connect_as_peer(identity: Identity, folder: Path, *, incarnation: str = "") -> tuple[HubConnection, Identity]:
    """A connection to the hub, and the identity with a new JWT if the server took the old one no more. Raises UserError
    if it takes neither."""
    try:
        return HubConnection(identity.address, incarnation=incarnation), identity
    except RefusedKeyError:
        _LOG.info("the hub does not accept this machine's JWT: asking for a new one")
    try:
        renewed = replace(identity, jwt=asyncio.run(_ask_apart(identity)))
    except RefusedKeyError as error:
        raise RefusedKeyError(
            f"the hub at {identity.url} does not accept our key: its owner has removed {identity.name} from the run, "
            "or has restored the hub from a time before this machine joined. Ask for a new invite and join with it in "
            "a new --folder"
        ) from error
    save_jwt(folder, renewed.jwt)
    return HubConnection(renewed.address, incarnation=incarnation), renewed


class Renewal:
    """Thread that renews the JWT of a connected peer, from `start` to `stop`; `on_renewed` gets each new JWT."""

    def __init__(
        self,
        connection: HubConnection,
        folder: Path,
        on_renewed: Callable[[str], None],
        *,
        pause_seconds: float = RENEW_SECONDS,
    ) -> None:
        self._connection, self._folder, self._on_renewed = connection, folder, on_renewed
        self._pause_seconds, self._stopped = pause_seconds, threading.Event()
        self._thread = threading.Thread(target=self._run, name="thinpipe-renewal", daemon=True)

    def start(self) -> None:
        connection_is_lost = self._stopped.set
        self._connection.on_failure(lambda _error: connection_is_lost())
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            try:
                jwt = _ask(self._connection)
                save_jwt(self._folder, jwt)
                self._on_renewed(jwt)
                pause = self._pause_seconds
            except (ConnectionError, TimeoutError, OSError, UserError) as error:
                _LOG.info("this machine's JWT was not renewed: %s", error)
                pause = min(_RETRY_SECONDS, self._pause_seconds)


def _ask(connection: HubConnection) -> str:
    """A new JWT. Does not count as waiting of the training thread."""
    return _decoded(connection.submit(SERVICE, b"", seconds=_ANSWER_SECONDS).result(_ANSWER_SECONDS + 5))


async def _ask_apart(identity: Identity) -> str:
    """A new JWT, asked for with what never expires and allows nothing else."""
    address, name = identity.renewal_address, identity.name
    client = await connect(
        address.url, address.fingerprint, address.credentials, inbox=f"_INBOX.{name}", on_down=lambda _error: None
    )
    try:
        return _decoded((await client.request(f"{HUB}.{name}.{SERVICE}", timeout=_ANSWER_SECONDS)).data)
    except NatsError as error:
        raise UnreachableError(
            f"the hub at {address.url} did not renew this machine's JWT ({error!r}): check that it runs, and try again"
        ) from error
    finally:
        await client.close()


def _decoded(reply: bytes) -> str:
    answer = decode_foreign(reply, RenewReply)
    if not answer.jwt:
        raise ProtocolError("the hub sent no JWT")
    if wrong_clock := wrong_clock_text(answer.time_s):
        _LOG.warning("%s", wrong_clock)
    return answer.jwt
