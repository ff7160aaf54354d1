"""Makes a NatsGroup the world of torch.distributed, once all its members are there."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from thinpipe.transport.nats.frame import Origin
from thinpipe.transport.nats.group import NatsGroup
from thinpipe.transport.nats.post import Post
from thinpipe.transport.nats.store import NatsStore

BACKEND = "nats"


def open_nats_group(
    post: Post,
    names: Sequence[str],
    origin: Origin,
    *,
    timeout: timedelta,
    incarnations: Mapping[str, int] | None = None,
) -> NatsGroup:
    """`names` are the members in the order of their ranks; all call this. Closed by `dist.destroy_process_group()`,
    which leaves the post open."""
    group = NatsGroup(post, names, origin, timeout=timeout, incarnations=incarnations)
    try:
        store = NatsStore(group.post, timeout)
        meet(store, origin, group.rank(), group.size())
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _prepared, extended_api=True, devices=["cpu"])
        dist.init_process_group(
            BACKEND, store=store, rank=group.rank(), world_size=group.size(), timeout=timeout, pg_options=group
        )
    except BaseException:
        group.close()
        raise
    return group


def meet(store: NatsStore, origin: Origin, rank: int, size: int) -> None:
    """Returns when every member hears its mail: what is sent to one that does not is lost."""
    place = f"{origin.run.hex()}/{origin.epoch}/there"
    store.set(f"{place}/{rank}", b"")
    store.wait([f"{place}/{other}" for other in range(size)])


def _prepared(_given: Any, group: NatsGroup) -> NatsGroup:
    """torch asks for a group when it is initialised: the one that is open."""
    return group
