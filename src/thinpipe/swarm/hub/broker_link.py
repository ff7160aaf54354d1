"""The hub's own connections to its broker, dialled again when they are lost; a server that has ended is started again.

Nothing but a server that ends again and again ends the hub: errors of the client are logged with their cause, and while
there is no connection the hub goes on without.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from nats.errors import Error as NatsError

from thinpipe.core.errors import UserError
from thinpipe.swarm.broker.broker import Broker, BrokerError
from thinpipe.swarm.hub.disconnects import Disconnects
from thinpipe.swarm.protocol.names import HUB
from thinpipe.transport.nats.client import connect
from thinpipe.transport.nats.direct_client import DirectClient

_LOG = logging.getLogger(__name__)
_CLOSE_SECONDS = 2.0
_STARTS, _START_SECONDS = 5, 600.0
"""A server that has to be started more often than `_STARTS` times within `_START_SECONDS` is given up."""


class BrokerLink:
    """Connections to the broker. `on_open` subscribes on each new connection; `tell_owner` prints a line."""

    def __init__(
        self,
        broker: Broker,
        disconnects: Disconnects,
        on_open: Callable[[DirectClient], Awaitable[None]],
        tell_owner: Callable[[str], None],
    ) -> None:
        self._broker, self._disconnects, self._on_open, self._tell_owner = broker, disconnects, on_open, tell_owner
        self._client: DirectClient | None = None
        self._lost_at = 0.0
        """When the connection was lost, in seconds of the monotonic clock."""
        self._cause = ""
        self._started_again: deque[float] = deque(maxlen=_STARTS)
        """When the server was started again, in seconds of the monotonic clock."""

    async def open(self) -> None:
        """Connects for the first time. Raises UserError if that fails."""
        await self._connect()

    @property
    def connected(self) -> bool:
        return self._client is not None and self._client.is_connected

    async def reconnect(self) -> None:
        """Tries once to connect again, and starts the server again if it has ended. Raises ConnectionError if that
        fails or does not last."""
        if self._client is not None:
            await self.close()
            self._lost_at = time.monotonic()
            self._tell_owner(f"the hub has lost the connection to its own server ({self._cause}): it dials again")
        if not self._broker.running:
            await self._start_again()
        try:
            await self._connect()
            await asyncio.to_thread(self._broker.catch_up)
        except (UserError, NatsError, OSError, BrokerError) as error:
            _LOG.warning("the hub cannot reach its own server: %s", error)
        else:
            self._tell_owner(f"the hub is connected again after {time.monotonic() - self._lost_at:.1f} s")

    async def _start_again(self) -> None:
        now, log = time.monotonic(), self._broker.log_tail()
        if len(self._started_again) == _STARTS and now - self._started_again[0] < _START_SECONDS:
            raise ConnectionError(f"nats-server ends again and again. The end of its log:\n{log}")
        self._started_again.append(now)
        _LOG.warning("nats-server has ended and is started again. The end of its log:\n%s", log)
        self._tell_owner("nats-server has ended: the hub starts it again (the end of its log is in hub/hub.log)")
        try:
            await asyncio.to_thread(self._broker.restart)
        except (UserError, OSError) as error:
            raise ConnectionError(f"nats-server has ended and cannot be started again: {error}") from error

    async def publish(self, subject: str, data: bytes) -> None:
        """Without a connection nothing is published: peers notice by themselves that it is lost."""
        if self._client is not None and self._client.is_connected:
            with suppress(NatsError, OSError):
                await self._client.publish(subject, data)

    async def flush(self) -> None:
        """Returns when the server has all that was published. Raises NatsError or ConnectionError."""
        if self._client is None:
            raise ConnectionError("the hub has no connection to its server now")
        await self._client.flush(timeout=5)

    async def close(self) -> None:
        client, self._client = self._client, None
        await self._disconnects.close()
        if client is not None:
            with suppress(NatsError, OSError, TimeoutError):
                await asyncio.wait_for(client.close(), _CLOSE_SECONDS)

    async def _connect(self) -> None:
        broker = self._broker
        self._cause = ""
        client = await connect(
            broker.url, broker.fingerprint, broker.hub_credentials, inbox=f"_INBOX.{HUB}", on_down=self._on_error
        )
        try:
            await self._disconnects.open()  # before anybody is answered from what it knows
            await self._on_open(client)
        except BaseException:
            await self._disconnects.close()
            await client.close()
            raise
        self._client = client

    def _on_error(self, error: Exception) -> None:
        """Any problem of the client. Whether the connection is lost is seen from `connected`."""
        self._cause = self._cause or str(error)
        _LOG.warning("the hub's connection to its server: %s", error, exc_info=error.__cause__)
