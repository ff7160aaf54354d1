"""One process of a measurement over NATS: a worker of `thinpipe bench links` whose runs talk through a broker.

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

from thinpipe.bench import links_worker
from thinpipe.bench.links_crew import Crew
from thinpipe.swarm.broker import Broker
from thinpipe.swarm.keys import KeyPair
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.group import NatsGroup
from thinpipe.transport.nats.post import Address, Post
from thinpipe.transport.settings import LinkSection
from thinpipe.transport.shaper import ShapedGroup

BACKEND = "prepared"
"""A group that is open already, under the name by which torch knows it."""
BROKER = "THINPIPE_BENCH_BROKER"
_epochs = count()


class ShapedNatsGroup(ShapedGroup):
    """NATS behind the emulated line that otherwise stands before gloo. Closing it closes both."""

    def __init__(self, inner: NatsGroup, link: LinkSection) -> None:
        super().__init__(inner, link, timeout=links_worker.TIMEOUT)
        self._nats = inner

    def close(self) -> None:
        super().close()
        self._nats.close()


@contextmanager
def nats_crew(folder: Path, size: int) -> Iterator[tuple[Broker, Crew]]:
    """A broker of its own and as many processes, which are gone at the end of the block."""
    keys = {f"p{rank}": KeyPair.new() for rank in range(size)}
    with Broker(folder / "broker") as broker:
        for name, key in keys.items():
            broker.add_peer(name, key.public_key)
        seeds = {name: key.seed for name, key in keys.items()}
        told = {"url": broker.url, "fingerprint": broker.fingerprint, "seeds": seeds}
        with Crew(size, variables={BROKER: json.dumps(told)}, worker="benchmarks.nats_worker") as crew:
            yield broker, crew


def open_over_nats(link: LinkSection) -> dist.ProcessGroup:
    told = json.loads(os.environ[BROKER])
    names = list(told["seeds"])
    group = NatsGroup(_post(), names, Origin(run=b"measured", epoch=next(_epochs)), timeout=links_worker.TIMEOUT)
    dist.barrier()  # everybody hears its mail
    ready = ShapedNatsGroup(group, link) if link.is_shaped else group
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, lambda _given, ready: ready, extended_api=True, devices=["cpu"])
    known: dist.ProcessGroup = dist.new_group(backend=BACKEND, timeout=links_worker.TIMEOUT, pg_options=ready)
    return known


@cache
def _post() -> Post:
    """One for all groups of this process, as a peer has."""
    told = json.loads(os.environ[BROKER])
    name = f"p{os.environ['RANK']}"
    return Post(Address(url=told["url"], fingerprint=told["fingerprint"], name=name, seed=told["seeds"][name]))


if __name__ == "__main__":
    links_worker.main(open_over_nats)
