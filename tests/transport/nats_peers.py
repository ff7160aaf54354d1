"""Process groups over a real broker, all in this process: every group has a thread of its own."""

import asyncio
import threading
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import msgspec

from thinpipe.swarm.hub.liveness import Heartbeats
from thinpipe.swarm.hub.services.budgets import BUDGETS
from thinpipe.swarm.hub.services.serve import Services
from thinpipe.swarm.hub.services.store import StoreService
from thinpipe.swarm.protocol import probe
from thinpipe.transport.nats.broadcasts import PeerLost
from thinpipe.transport.nats.client import connect
from thinpipe.transport.nats.connection import Address, HubConnection
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.group import NatsGroup

ORIGIN = Origin(run=b"test-run")


def address(running, name):
    return Address(url=running.url, fingerprint=running.fingerprint, name=name, credentials=running.credentials[name])


@contextmanager
def open_groups(running, names, *, timeout=timedelta(seconds=300), **settings):
    with ExitStack() as stack:
        groups = []
        for name in names:
            connection = HubConnection(address(running, name))
            stack.callback(connection.close)
            group = NatsGroup(connection, names, ORIGIN, timeout=timeout, **settings)
            stack.callback(group.close)
            groups.append(group)
        yield groups


@contextmanager
def hub_services(running, *, heartbeats=None, **services):
    """The hub's part: the store, whose heart beats, and these services. Yields a way to publish as the hub. Nobody is
    lost because this machine is slow, but to `heartbeats` that say so."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def call(asked):
        return asyncio.run_coroutine_threadsafe(asked, loop).result(timeout=300)

    async def start():
        client = await connect(
            running.url, running.fingerprint, running.broker.hub_credentials, inbox="_INBOX.hub", on_down=lambda _: None
        )
        known = heartbeats or Heartbeats(timeout_seconds=300.0)

        async def on_heartbeat(peer, _data):
            known.on_heartbeat(peer, time.monotonic())

        every = {"store": StoreService(), probe.SERVICE: probe.probe_service, "heartbeat": on_heartbeat, **services}
        budgets = dict.fromkeys(every, BUDGETS["tokens"]) | BUDGETS
        await Services(every, budgets=budgets).open(client, running.credentials)
        watches.append(asyncio.create_task(tell_of_lost_peers(client, known)))
        return client

    async def end():
        await client.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    watches = []
    client = call(start())
    try:
        yield lambda subject, data: call(client.publish(subject, data))
    finally:
        call(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=300)
        loop.close()


async def tell_of_lost_peers(client, heartbeats):
    """As the hub does, until it is cancelled."""
    while True:
        for name, _seconds in heartbeats.newly_timed_out(time.monotonic()):
            await client.publish("bcast.lost", msgspec.msgpack.encode(PeerLost(peer=name)))
        await asyncio.sleep(0.2)


def together(*actions, seconds=600):
    """Runs each in a thread; what they returned, or the first error."""
    results, errors = [None] * len(actions), []

    def run(index, action):
        try:
            results[index] = action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=entry, daemon=True) for entry in enumerate(actions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=seconds)
        assert not thread.is_alive(), "still waiting"
    if errors:
        raise errors[0]
    return results
