"""The server tells who has gone: at once, and only when no connection is left."""

import asyncio
from contextlib import AsyncExitStack

from tests.swarm.brokers import dialled, running_broker
from thinpipe.swarm.hub.disconnects import Disconnects
from thinpipe.swarm.protocol.keys import KeyPair


def test_who_has_no_connection_left_is_told_at_once_and_nobody_else(tmp_path):
    async def scenario(running):
        gone, news = [], asyncio.Event()

        async def heard(name):
            gone.append(name)
            news.set()

        disconnects = Disconnects(running.broker, heard)
        await disconnects.open()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(disconnects.close)
            await stack.enter_async_context(dialled(running.broker, "p1", running.credentials["p1"]))
            async with dialled(running.broker, "p0", running.credentials["p0"]):
                async with dialled(running.broker, "p0", running.credentials["p0"]):
                    await asyncio.to_thread(running.broker.add_peer, "p2", KeyPair.new().public_key)
                await asyncio.sleep(1)
                assert gone == [], "one connection is left"
            await asyncio.wait_for(news.wait(), 300)
            await asyncio.sleep(0.3)
            assert set(gone) == {"p0"}

    with running_broker(tmp_path) as running:
        asyncio.run(scenario(running))
