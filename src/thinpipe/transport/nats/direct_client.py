"""NATS client whose read loop ends with its connection only, and which can hand over messages without a queue.

nats-py keeps a queue for each subscription. When it is full, messages are dropped whoever sent them; a `Receiver` sees
every message at once instead and decides for each.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nats.aio.client import Client
from nats.errors import ConnectionClosedError

_LOG = logging.getLogger(__name__)
Receiver = Callable[[str, str, bytes], None]
"""Callback with a message's subject, reply subject (or "") and data; runs in the read loop and must not block. Messages
with headers are dropped: only replies have them."""


class DirectClient(Client):
    """NATS client that drops a message which it cannot read, as one with malformed headers, which the server passes on.
    nats-py's own read loop would end, no error being reported, and with it the connection."""

    def __init__(self) -> None:
        super().__init__()
        self._receivers: dict[int, Receiver] = {}
        self._left: dict[int, int] = {}
        """Messages until the server ends a subscription that has a limit."""

    async def close_within(self, seconds: float) -> None:
        """Closes the client; its socket is closed at once if the server does not take what is left in this time, as on
        an interrupted link or after a failed TLS handshake."""
        writer = getattr(self._transport, "_io_writer", None)
        try:
            async with asyncio.timeout(seconds):
                await self.close()
        except Exception as error:  # a half-open client may fail to close in many ways
            _LOG.info("a connection was cut off: %r", error)
        finally:
            if writer is not None:
                writer.transport.abort()

    async def receive(self, limits: Mapping[str, int], receiver: Receiver, *, queue: str = "") -> list[int]:
        """Subscribes to these subjects and returns the subscriptions' numbers, for `stop_receiving`.

        The server ends a subscription after this many messages, and so never holds more of them for this client; 0: no
        limit. Of several subscriptions with the same `queue`, one gets a message.
        """
        numbers, lines = [], []
        for subject, limit in limits.items():
            self._sid += 1
            numbers.append(self._sid)
            self._receivers[self._sid] = receiver
            lines.append(f"SUB {subject} {queue} {self._sid}")
            if limit:
                self._left[self._sid] = limit
                lines.append(f"UNSUB {self._sid} {limit}")
        if lines:
            await self._command(*lines)
        return numbers

    def is_receiving(self, number: int) -> bool:
        """True until the subscription was stopped or has reached its limit."""
        return number in self._receivers

    async def stop_receiving(self, numbers: Collection[int]) -> None:
        """Ends subscriptions of `receive`: messages that the server has sent already are dropped."""
        live = [number for number in numbers if self._receivers.pop(number, None) is not None]
        if live and self.is_connected:
            await self._command(*(f"UNSUB {number}" for number in live))

    async def _command(self, *lines: str) -> None:
        """Sends lines of NATS's protocol in one piece, so that the server handles them together."""
        if self.is_closed:
            raise ConnectionClosedError
        await self._send_command("".join(f"{line}\r\n" for line in lines).encode())
        await self._flush_pending()

    async def _process_msg(self, sid: Any, subject: Any, reply: Any, data: bytes, headers: Any) -> None:
        try:
            receiver = self._receivers.get(sid)
            if receiver is None:
                await super()._process_msg(sid, subject, reply, data, headers)
                return
            if sid in self._left:
                self._left[sid] -= 1
                if not self._left[sid]:
                    del self._left[sid], self._receivers[sid]
            if not headers:
                receiver(bytes(subject).decode(), bytes(reply).decode(), data)
        except Exception as error:
            named = bytes(subject).decode(errors="replace")
            _LOG.warning("dropped a message to %.200s that cannot be read: %r", ascii(named), error)
