"""A real broker for tests, with peers that have keys, and the programs that dial it."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.nats.client import Credentials, connect

_CLOSE_SECONDS = 60
"""For what a client has still to send; then its socket is closed, which one that does not read would leave open."""


@dataclass(frozen=True)
class RunningBroker:
    broker: Broker
    credentials: dict[str, Credentials]
    """Of every peer, by name."""

    @property
    def url(self) -> str:
        return self.broker.url

    @property
    def fingerprint(self) -> str:
        return self.broker.fingerprint


@contextmanager
def running_broker(folder, peers=("p0", "p1"), **settings) -> Iterator[RunningBroker]:
    """Peers get new keys, so on a folder that had a broker before, name others than it had."""
    keys = {name: KeyPair.new() for name in peers}
    with Broker(folder / "broker", **settings) as broker:
        for name, key in keys.items():
            broker.add_peer(name, key.public_key)
        yield RunningBroker(broker, {name: credentials_of(broker, name, key) for name, key in keys.items()})


def credentials_of(broker, name, key):
    """As the hub gives them to a member."""
    return Credentials(seed=key.seed, jwt=broker.authority.peer_jwt(name, key.public_key))


class Faults(list):
    """An on_down that remembers."""

    def __init__(self):
        super().__init__()
        self._came = threading.Event()

    def __call__(self, error):
        self.append(error)
        self._came.set()

    async def wait(self, seconds=300):
        """The first fault, or None when there was none for so long."""
        await asyncio.to_thread(self._came.wait, seconds)
        return self[0] if self else None


@asynccontextmanager
async def dialled(broker, name, credentials):
    """A client with its faults, closed at the end."""
    faults = Faults()
    client = await connect(broker.url, broker.fingerprint, credentials, inbox=f"_INBOX.{name}", on_down=faults)
    try:
        yield client, faults
    finally:
        await client.close_within(_CLOSE_SECONDS)
