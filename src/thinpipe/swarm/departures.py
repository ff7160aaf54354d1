"""Hears from the server who has no connection any more: a program that was killed is missed at once, not by its beats.

The server tells it to its own account, of which the hub has the key. Without these news the beats still tell.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from thinpipe.swarm.broker import Broker
from thinpipe.swarm.reading import read
from thinpipe.transport.nats.dial import connect

_NEWS, _ASK = "$SYS.ACCOUNT.APP.DISCONNECT", "$SYS.REQ.ACCOUNT.APP.CONNZ"
_SECONDS = 5


class _Client(msgspec.Struct):
    user: str = ""
    """Its public key."""


class _News(msgspec.Struct):
    client: _Client


class _Count(msgspec.Struct):
    num_connections: int
    """That the question names; `total` is that of everybody."""


class _Connections(msgspec.Struct):
    data: _Count


_READ_NEWS, _READ_CONNECTIONS = msgspec.json.Decoder(_News), msgspec.json.Decoder(_Connections)


class Departures:
    """An async context manager. `gone` is called with the name of a peer whose last connection has closed."""

    def __init__(self, broker: Broker, gone: Callable[[str], Awaitable[None]]) -> None:
        self._broker, self._gone = broker, gone
        self._looking: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        broker = self._broker
        self._client = await connect(
            broker.url, broker.fingerprint, broker.admin_seed, inbox="_INBOX.departures", on_down=lambda _error: None
        )
        await self._client.subscribe(_NEWS, cb=self._heard)
        await self._client.flush(timeout=_SECONDS)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._looking:
            task.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        if self._client.is_connected:
            await self._client.close()

    async def _heard(self, message: Msg) -> None:
        """In a task of its own: the client cannot be closed well while it calls us."""
        task = asyncio.create_task(self._look(message))
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _look(self, message: Msg) -> None:
        news = read(_READ_NEWS, message.data)
        key = "" if news is None else news.client.user
        name = next((name for name, known in self._broker.peers.items() if known == key), None)
        if name is not None and await self._has_none_left(key):
            await self._gone(name)

    async def _has_none_left(self, key: str) -> bool:
        """A peer has more than one connection, and who comes back has new ones before the old are found dead."""
        question = json.dumps({"auth": True, "user": key}).encode()
        with suppress(NatsError):
            answer = await self._client.request(_ASK, question, timeout=_SECONDS)
            found = read(_READ_CONNECTIONS, answer.data)
            return found is not None and found.data.num_connections == 0
        return False
