"""A member that sends one message again and again, as fast as its socket takes it: what a program in another language
could do, whose speed no client's code limits."""

import asyncio
import threading
from contextlib import suppress

from nats.errors import Error as NatsError

from thinpipe.core.errors import UserError
from thinpipe.transport.nats.client import connect

_BLOCK_NBYTES = 1 << 20


class Flooder:
    """Context manager that floods from its own thread; dials again when the server ends the connection."""

    def __init__(self, address, subject, body, *, reply=""):
        self._address = address
        one = f"PUB {subject} {reply} {len(body)}\r\n".encode() + body + b"\r\n"
        self._count = max(1, _BLOCK_NBYTES // len(one))
        self._block = one * self._count
        self.sent = 0
        """Messages that the socket has taken."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._flood(),), daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_error):
        self._ended.set()
        self._thread.join(60)

    async def _flood(self):
        while not self._ended.is_set():
            with suppress(UserError, NatsError, OSError, AttributeError):
                address = self._address
                inbox = f"_INBOX.{address.name}"
                client = await connect(
                    address.url, address.fingerprint, address.credentials, inbox=inbox, on_down=lambda _error: None
                )
                try:
                    while client.is_connected and not self._ended.is_set():
                        client._transport.write(self._block)
                        await asyncio.wait_for(client._transport.drain(), 5)
                        self.sent += self._count
                finally:
                    with suppress(Exception):
                        await asyncio.wait_for(client.close(), 1)
            await asyncio.sleep(0)
