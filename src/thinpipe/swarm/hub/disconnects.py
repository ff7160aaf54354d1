"""Detects peers whose last broker connection has closed, so that a killed process is noticed before its heartbeats time
out; tells from where a peer is connected, and has connections watched that do not read.

nats-server publishes disconnects in its system account, for which the hub has the admin key. If these events are
missed, heartbeat timeouts still apply.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from thinpipe.core.bounds import Count, Text
from thinpipe.core.foreign import ProtocolError, decode_foreign
from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.hub.slow_readers import SlowReaders
from thinpipe.transport.nats.client import connect

_LOG = logging.getLogger(__name__)
_REQUEST_TIMEOUT_SECONDS = 5
"""Timeout of a request to the server, in seconds."""


_MAX_CONNECTIONS = 10_000


class _Client(msgspec.Struct):
    user: Text = ""
    """Public key of the client."""


class DisconnectEvent(msgspec.Struct):
    """Disconnect event of nats-server; other fields are ignored."""

    client: _Client


class _Connection(msgspec.Struct):
    ip: Text = ""
    """Address of the client, as the server sees it."""


class _ConnectionCount(msgspec.Struct):
    num_connections: Count
    """Number of connections of the user in the request (`total` counts all users)."""
    connections: Annotated[list[_Connection], msgspec.Meta(max_length=_MAX_CONNECTIONS)] = []


class Connections(msgspec.Struct):
    """Reply of nats-server to a CONNZ request; other fields are ignored."""

    data: _ConnectionCount


class Disconnects:
    """Calls `on_disconnect` with the name of a peer whose last connection has closed, from `open` to `close`. May be
    opened again, on a new connection to the broker."""

    def __init__(
        self,
        broker: Broker,
        on_disconnect: Callable[[str], Awaitable[None]],
        tell_owner: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._broker, self._on_disconnect = broker, on_disconnect
        self._slow_readers = SlowReaders(broker, tell_owner)
        self._watch: asyncio.Task[None] | None = None
        self._checks: set[asyncio.Task[None]] = set()
        self._client: Client | None = None

    async def open(self) -> None:
        broker = self._broker
        self._client = await connect(
            broker.url, broker.fingerprint, broker.admin_credentials, inbox="_INBOX.disconnects", on_down=_on_error
        )
        await self._client.subscribe(f"$SYS.ACCOUNT.{broker.authority.account}.DISCONNECT", cb=self._on_message)
        await self._client.flush(timeout=_REQUEST_TIMEOUT_SECONDS)
        self._watch = asyncio.create_task(self._slow_readers.watch(self._client))

    async def close(self) -> None:
        tasks = [*self._checks, *([] if self._watch is None else [self._watch])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None and self._client.is_connected:
            with suppress(NatsError, OSError, TimeoutError):
                await asyncio.wait_for(self._client.close(), _REQUEST_TIMEOUT_SECONDS)

    async def _on_message(self, message: Msg) -> None:
        """Checks in a separate task: the client cannot be closed cleanly from within its own callback."""
        task = asyncio.create_task(self._check(message))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, message: Msg) -> None:
        """Calls `on_disconnect` if the client was a peer and has no other connection."""
        try:
            key = decode_foreign(message.data, DisconnectEvent, form="json").client.user
        except ProtocolError as error:
            _LOG.warning("nats-server reported a disconnect that cannot be read: %s", error)
            return
        name = self._broker.name_of(key)
        if name is not None and await self._has_no_connections(key):
            await self._on_disconnect(name)

    async def addresses_of(self, peer: str) -> set[str]:
        """Addresses from which the server sees connections of a peer; none if the server does not say."""
        key = self._broker.peers.get(peer)
        if key is None:  # the server would name the connections of all
            return set()
        try:
            found = await self._connections_of(key)
        except (NatsError, ProtocolError) as error:
            _LOG.warning("nats-server did not say from where a peer is connected: %s", error)
            return set()
        return {connection.ip for connection in found.connections}

    async def _has_no_connections(self, key: str) -> bool:
        """True if the server has no connection with this key. A peer has several connections, and a reconnecting peer
        opens new ones before the old ones are found dead."""
        try:
            return (await self._connections_of(key)).num_connections == 0
        except (NatsError, ProtocolError) as error:
            _LOG.warning(
                "nats-server did not say whether a peer is connected, relying on heartbeat timeouts: %s", error
            )
            return False

    async def _connections_of(self, key: str) -> _ConnectionCount:
        assert self._client is not None
        question = json.dumps({"auth": True, "user": key}).encode()
        subject = f"$SYS.REQ.ACCOUNT.{self._broker.authority.account}.CONNZ"
        answer = await self._client.request(subject, question, timeout=_REQUEST_TIMEOUT_SECONDS)
        return decode_foreign(answer.data, Connections, form="json").data


def _on_error(error: Exception) -> None:
    _LOG.warning("the hub's connection to the server's system account: %s", error)
