"""Opens a NatsGroup as the default process group (WORLD) of torch.distributed, once all members are present."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinpipe.transport.nats.connection import HubConnection
from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.group import NatsGroup
from thinpipe.transport.nats.store import NatsStore

BACKEND = "nats"


def open_nats_group(
    connection: HubConnection,
    names: Sequence[str],
    origin: Origin,
    *,
    timeout: timedelta,
    incarnations: Mapping[str, int] | None = None,
) -> NatsGroup:
    """Opens the process group of a generation and initialises torch.distributed with it.

    `names`: members in rank order; all of them must call this. Closed by `dist.destroy_process_group()`, which leaves
    the connection open.
    """
    group = NatsGroup(connection, names, origin, timeout=timeout, incarnations=incarnations)
    try:
        store = NatsStore(group.connection, timeout)
        barrier(store, origin, group.rank(), group.size())
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _existing_group, extended_api=True, devices=["cpu"])
        dist.init_process_group(
            BACKEND, store=store, rank=group.rank(), world_size=group.size(), timeout=timeout, pg_options=group
        )
    except BaseException:
        group.close()
        raise
    return group


def barrier(store: NatsStore, origin: Origin, rank: int, size: int) -> None:
    """Returns when every member has subscribed to its messages: NATS drops messages without a subscriber."""
    place = f"{origin.run.hex()}/{origin.generation}/there"
    store.set(f"{place}/{rank}", b"")
    store.wait([f"{place}/{other}" for other in range(size)])


def _existing_group(_given: Any, group: NatsGroup) -> NatsGroup:
    """Backend constructor called by torch: returns the group that is already open."""
    return group
