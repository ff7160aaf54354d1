"""Answers peers' requests: each service is a function from who asks and what to an answer.

Permissions of the server say who may ask as whom. It does not check where an answer is to go: we answer to the mailbox
of the one who asks, and to nobody else's.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg

Service = Callable[[str, bytes], Awaitable[bytes | None]]


MOST_AT_ONCE = 1024
"""Requests of one peer to one service; more get no answer."""
MOST_NBYTES = 2 << 20
"""Of a request; a longer one gets no answer."""


async def serve(client: Client, name: str, service: Service) -> None:
    """When this returns, every request from now on is heard. One that waits holds up no other; what is malformed gets
    no answer."""
    under_way: set[asyncio.Task[None]] = set()
    of_peer: Counter[str] = Counter()

    async def answer(peer: str, message: Msg) -> None:
        try:
            found = await service(peer, message.data)
        finally:
            of_peer[peer] -= 1
        if found is not None and message.reply.startswith(f"_INBOX.{peer}.") and client.is_connected:
            await client.publish(message.reply, found)

    async def asked(message: Msg) -> None:
        peer = message.subject.split(".")[1]
        if of_peer[peer] < MOST_AT_ONCE and len(message.data) <= MOST_NBYTES:
            of_peer[peer] += 1
            task = asyncio.create_task(answer(peer, message))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    await client.subscribe(f"hub.*.{name}", cb=asked)
    await client.flush(timeout=10)
