"""Serves requests over NATS: a service is a coroutine function from the sender's name and the request data to the
reply.

Requests arrive on `hub.<peer>.<service>`. The broker lets a peer publish only under its own name, so the sender is
known; but a request may name any reply subject, so replies are sent only to the sender's own inbox.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg

_LOG = logging.getLogger(__name__)
Service = Callable[[str, bytes], Awaitable[bytes | None]]
"""Handler of requests: (peer, data) to the reply, or None for no reply."""


MAX_IN_FLIGHT = 1024
"""Maximum number of unanswered requests of one peer to one service; further ones are dropped."""
MAX_REQUEST_NBYTES = 2 << 20
"""Maximum size of a request, in bytes; longer ones are dropped."""


async def serve(client: Client, name: str, service: Service) -> None:
    """Subscribes a service; every request sent after this returns is received. Requests run concurrently, each in its
    own task. A request gets no reply if the service returns None (malformed) or raises, or if it exceeds the limits
    above."""
    in_flight: set[asyncio.Task[None]] = set()
    in_flight_of_peer: Counter[str] = Counter()

    async def answer(peer: str, message: Msg) -> None:
        try:
            reply = await service(peer, message.data)
        finally:
            in_flight_of_peer[peer] -= 1
        if reply is None:
            return
        if message.reply.startswith(f"_INBOX.{peer}.") and client.is_connected:
            await client.publish(message.reply, reply)
        else:
            _LOG.info("%s: reply to %s dropped: no connection, or a foreign reply subject", name, peer)

    async def on_message(message: Msg) -> None:
        peer = message.subject.split(".")[1]
        if in_flight_of_peer[peer] < MAX_IN_FLIGHT and len(message.data) <= MAX_REQUEST_NBYTES:
            in_flight_of_peer[peer] += 1
            task = asyncio.create_task(answer(peer, message))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        else:
            nbytes, n_in_flight = len(message.data), in_flight_of_peer[peer]
            _LOG.info("%s: request of %s dropped: %d bytes, %d in flight", name, peer, nbytes, n_in_flight)

    await client.subscribe(f"hub.*.{name}", cb=on_message)
    await client.flush(timeout=10)
