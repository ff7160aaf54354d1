"""Detects peers whose last broker connection has closed, so that a killed process is noticed before its heartbeats time
out.

nats-server publishes disconnects in its system account, for which the hub has the admin key. If these events are
missed, heartbeat timeouts still apply.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.protocol.decoding import decode_or_none
from thinpipe.transport.nats.client import connect

_DISCONNECT_SUBJECT, _CONNZ_SUBJECT = "$SYS.ACCOUNT.APP.DISCONNECT", "$SYS.REQ.ACCOUNT.APP.CONNZ"
_LOG = logging.getLogger(__name__)
_REQUEST_TIMEOUT_SECONDS = 5
"""Timeout of a request to the server, in seconds."""


class _Client(msgspec.Struct):
    user: str = ""
    """Public key of the client."""


class _DisconnectEvent(msgspec.Struct):
    """Disconnect event of nats-server; other fields are ignored."""

    client: _Client


class _ConnectionCount(msgspec.Struct):
    num_connections: int
    """Number of connections of the user in the request (`total` counts all users)."""


class _Connections(msgspec.Struct):
    """Reply of nats-server to a CONNZ request; other fields are ignored."""

    data: _ConnectionCount


_DISCONNECT_DECODER, _CONNECTIONS_DECODER = msgspec.json.Decoder(_DisconnectEvent), msgspec.json.Decoder(_Connections)


class Disconnects:
    """Async context manager. Calls `on_disconnect` with the name of a peer whose last connection has closed."""

    def __init__(self, broker: Broker, on_disconnect: Callable[[str], Awaitable[None]]) -> None:
        self._broker, self._on_disconnect = broker, on_disconnect
        self._checks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        broker = self._broker
        self._client = await connect(
            broker.url, broker.fingerprint, broker.admin_seed, inbox="_INBOX.disconnects", on_down=lambda _error: None
        )
        await self._client.subscribe(_DISCONNECT_SUBJECT, cb=self._on_message)
        await self._client.flush(timeout=_REQUEST_TIMEOUT_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._checks:
            task.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        if self._client.is_connected:
            await self._client.close()

    async def _on_message(self, message: Msg) -> None:
        """Checks in a separate task: the client cannot be closed cleanly from within its own callback."""
        task = asyncio.create_task(self._check(message))
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    async def _check(self, message: Msg) -> None:
        """Calls `on_disconnect` if the client was a peer and has no other connection."""
        event = decode_or_none(_DISCONNECT_DECODER, message.data)
        key = "" if event is None else event.client.user
        name = next((name for name, known in self._broker.peers.items() if known == key), None)
        if name is not None and await self._has_no_connections(key):
            await self._on_disconnect(name)

    async def _has_no_connections(self, key: str) -> bool:
        """True if the server has no connection with this key. A peer has several connections, and a reconnecting peer
        opens new ones before the old ones are found dead."""
        question = json.dumps({"auth": True, "user": key}).encode()
        try:
            answer = await self._client.request(_CONNZ_SUBJECT, question, timeout=_REQUEST_TIMEOUT_SECONDS)
        except NatsError as error:
            _LOG.warning(
                "nats-server did not say whether a peer is connected, relying on heartbeat timeouts: %s", error
            )
            return False
        found = decode_or_none(_CONNECTIONS_DECODER, answer.data)
        return found is not None and found.data.num_connections == 0
