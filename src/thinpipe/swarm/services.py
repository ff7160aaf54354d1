"""Answers peers' requests: each service is a function from who asks and what to an answer.

Permissions of the server say who may ask as whom. It does not check where an answer is to go: we answer to the mailbox
of the one who asks, and to nobody else's.
"""

import asyncio
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg

Service = Callable[[str, bytes], Awaitable[bytes | None]]


MOST_AT_ONCE = 10_000
"""Requests under way; more get no answer."""


async def serve(client: Client, name: str, service: Service) -> None:
    """When this returns, every request from now on is heard. One that waits holds up no other; what is malformed gets
    no answer."""
    under_way: set[asyncio.Task[None]] = set()

    async def answer(peer: str, message: Msg) -> None:
        found = await service(peer, message.data)
        if found is not None and message.reply.startswith(f"_INBOX.{peer}."):
            await client.publish(message.reply, found)

    async def asked(message: Msg) -> None:
        if len(under_way) < MOST_AT_ONCE:
            task = asyncio.create_task(answer(message.subject.split(".")[1], message))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    await client.subscribe(f"hub.*.{name}", cb=asked)
    await client.flush(timeout=10)
