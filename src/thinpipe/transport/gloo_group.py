"""Opens the gloo process group of a run, with an emulated home link in front of every process if configured."""

import os
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from thinpipe.config.link import LinkConfig
from thinpipe.transport.emulation.shaped_group import InnerGroup, ShapedGroup
from thinpipe.transport.rendezvous import STORE_FD

SHAPED = "shaped"


class _Options(NamedTuple):
    link: LinkConfig
    seed: int


def open_group(link: LinkConfig, *, timeout: timedelta, seed: int = 0) -> dist.ProcessGroup:
    """Process group of all ranks. All processes must call this, with the same `link`.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT unless torch.distributed is initialised already. Closed by
    `dist.destroy_process_group()`; a shaped group can also be closed separately by its `close`.
    """
    if not dist.is_initialized():
        init_gloo(timeout)
    world = dist.group.WORLD
    assert world is not None
    if not link.is_shaped:
        return world
    if SHAPED not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHAPED, _create, extended_api=True, devices=["cpu"])
    group: dist.ProcessGroup = dist.new_group(backend=SHAPED, timeout=timeout, pg_options=_Options(link, seed))
    return group


def init_gloo(timeout: timedelta) -> None:
    """Initialises torch.distributed from the environment. Under the local launcher, process 0 serves the store on an
    inherited socket (`transport/rendezvous.py`)."""
    descriptor = os.environ.pop(STORE_FD, None)
    if descriptor is None:
        dist.init_process_group("gloo", timeout=timeout)
        return
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    owner: dict[str, Any] = {"is_master": True, "master_listen_fd": int(descriptor)} if descriptor else {}
    store = dist.TCPStore(os.environ["MASTER_ADDR"], port, size, timeout=timeout, **owner)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _create(given: Any, options: _Options) -> ShapedGroup:
    """Called by torch with the store, rank and size of the new group."""
    inner = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, timeout=given.timeout)
    return ShapedGroup(cast(InnerGroup, inner), options.link, timeout=given.timeout, seed=options.seed)
