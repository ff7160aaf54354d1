"""A member opens connections that read nothing: what waits for them at the server is bounded over all of them."""

import asyncio
from contextlib import AsyncExitStack

import psutil
import pytest

from tests.programs import PATIENCE
from tests.swarm.brokers import dialled, running_broker
from thinpipe.swarm.broker.config import Limits
from thinpipe.swarm.hub.disconnects import Disconnects

CONNECTIONS, NBYTES = 8, 120 << 20
"""Connections, and bytes that come for each: less than one may have waiting, and far more in all."""


async def deaf(stack, broker, name, credentials):
    """A connection that listens to its inbox and reads nothing."""
    client, _ = await stack.enter_async_context(dialled(broker, name, credentials))
    await client.receive({f"_INBOX.{name}.z": 0}, lambda *_message: None)
    await client.flush(timeout=PATIENCE)
    client._transport._io_writer.transport.pause_reading()
    return client


@pytest.mark.parametrize("who", ["member", "invite"])
def test_the_server_holds_no_more_for_many_connections_than_for_two(who, tmp_path):
    async def gone(_name):
        pass

    async def scenario(running, name, credentials):
        printed, broker = [], running.broker
        disconnects = Disconnects(broker, gone, printed.append)
        server, most = psutil.Process(broker.server_pid), 0
        await disconnects.open()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(disconnects.close)
            for _ in range(CONNECTIONS):
                await deaf(stack, broker, name, credentials)
            hub, _ = await stack.enter_async_context(dialled(broker, "hub", broker.hub_credentials))
            for _ in range(NBYTES >> 20):
                await hub.publish(f"_INBOX.{name}.z", bytes(1 << 20))
                await hub.flush(timeout=PATIENCE)
                await asyncio.sleep(0.02)  # as fast as a home's link, not as this machine
                most = max(most, server.memory_info().rss)
            assert any(f"connections of {name} do not read" in line for line in printed)
            assert len(printed) == 1
        return most

    with running_broker(tmp_path, ("p0",)) as running:
        name, credentials = "p0", running.credentials["p0"]
        if who == "invite":
            invite = running.broker.add_invite(url=running.url, run="r", seconds=60)
            name, credentials = invite.id, invite.credentials
        assert asyncio.run(scenario(running, name, credentials)) < 2.5 * Limits().pending_nbytes
