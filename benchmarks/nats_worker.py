"""One process of a measurement over NATS: a worker of `python -m benchmarks.links` whose runs talk through a broker.

`nats_crew` starts a real broker, with TLS and a key per process, and its processes. They also have torch's own group,
over which only the beginnings of steps are agreed.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import torch.distributed as dist

from benchmarks.links import worker as links_worker
from benchmarks.links.worker_pool import WorkerPool
from thinpipe.config.link import LinkConfig
from thinpipe.swarm.broker.broker import Broker
from thinpipe.swarm.protocol.keys import KeyPair
from thinpipe.transport.emulation.shaped_group import ShapedGroup
from thinpipe.transport.nats.client import Credentials
from thinpipe.transport.nats.connection import Address, HubConnection
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.group import NatsGroup

BACKEND = "prepared"
"""A group that is open already, under the name by which torch knows it."""
BROKER = "THINPIPE_BENCH_BROKER"
_generations = count()


class ShapedNatsGroup(ShapedGroup):
    """NATS behind the emulated link that otherwise stands before gloo. Closing it closes both."""

    def __init__(self, inner: NatsGroup, link: LinkConfig) -> None:
        super().__init__(inner, link, timeout=links_worker.TIMEOUT)
        self._nats = inner

    def close(self) -> None:
        super().close()
        self._nats.close()


@contextmanager
def nats_crew(folder: Path, size: int) -> Iterator[tuple[Broker, WorkerPool]]:
    """A broker of its own and as many processes, which are gone at the end of the block."""
    keys = {f"p{rank}": KeyPair.new() for rank in range(size)}
    with Broker(folder / "broker") as broker:
        for name, key in keys.items():
            broker.add_peer(name, key.public_key)
        credentials = {
            name: {"seed": key.seed, "jwt": broker.authority.peer_jwt(name, key.public_key)}
            for name, key in keys.items()
        }
        broker_access = {"url": broker.url, "fingerprint": broker.fingerprint, "credentials": credentials}
        with WorkerPool(size, variables={BROKER: json.dumps(broker_access)}, worker="benchmarks.nats_worker") as crew:
            yield broker, crew


def open_over_nats(link: LinkConfig) -> dist.ProcessGroup:
    broker_access = json.loads(os.environ[BROKER])
    names = list(broker_access["credentials"])
    group = NatsGroup(
        _connection(), names, Origin(run=b"measured", generation=next(_generations)), timeout=links_worker.TIMEOUT
    )
    dist.barrier()  # every process has subscribed to its subjects
    ready = ShapedNatsGroup(group, link) if link.is_shaped else group
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda _given, ready: ready, extended_api=True, devices=["cpu"])
    known: dist.ProcessGroup = dist.new_group(backend=BACKEND, timeout=links_worker.TIMEOUT, pg_options=ready)
    return known


@cache
def _connection() -> HubConnection:
    """One for all groups of this process, as a peer has."""
    broker_access = json.loads(os.environ[BROKER])
    name = f"p{os.environ['RANK']}"
    return HubConnection(
        Address(
            url=broker_access["url"],
            fingerprint=broker_access["fingerprint"],
            name=name,
            credentials=Credentials(**broker_access["credentials"][name]),
        )
    )


if __name__ == "__main__":
    links_worker.main(open_over_nats)
