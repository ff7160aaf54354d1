"""Opens the process group of a run: gloo as it is, or with a home line in front of every process."""

import os
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from thinpipe.transport.rendezvous import STORE_FD
from thinpipe.transport.settings import LinkSection
from thinpipe.transport.shaper import InnerGroup, ShapedGroup

SHAPED = "shaped"


class _Options(NamedTuple):
    link: LinkSection
    seed: int


def open_group(link: LinkSection, *, timeout: timedelta, seed: int = 0) -> dist.ProcessGroup:
    """All processes, in the order of their ranks; they must give the same `link`, and all call this.

    Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT unless torch.distributed is initialised already. Closed with all
    others by `dist.destroy_process_group()`; a shaped one alone by its `close`.
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
    """Initialises torch.distributed from the environment. Process 0 of a local launcher serves the store on the socket
    that it inherited (`transport/rendezvous.py`)."""
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
