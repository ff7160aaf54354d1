"""Opens the gloo process group of a run, with an emulated home link in front of every process if configured."""

import os
import sys
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from thinpipe.config.link import LinkConfig
from thinpipe.transport.emulation.shaped_group import InnerGroup, ShapedGroup
from thinpipe.transport.rendezvous import ADDRESS, PORT_FILE, listen, wait_for_port

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
    """Initialises torch.distributed from the environment, under the local launcher by `transport/rendezvous.py`."""
    if PORT_FILE not in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=_open_store(rank, size, timeout), rank=rank, world_size=size, timeout=timeout)


def _open_store(rank: int, size: int, timeout: timedelta) -> Any:
    """Torch's store of a local group; process 0 serves it."""
    options: dict[str, Any] = {"timeout": timeout, "use_libuv": _use_libuv()}
    if rank == 0:
        listening = listen(size)
        port = listening.getsockname()[1]
        options |= {"is_master": True, "master_listen_fd": listening.detach()}
    else:
        port = wait_for_port(timeout)
    return dist.TCPStore(ADDRESS, port, size, **options)  # type: ignore[attr-defined]


def _use_libuv() -> bool:
    """Whether stores use libuv, which PyTorch's Windows wheels lack; USE_LIBUV as in torch's own rendezvous."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"


def _create(given: Any, options: _Options) -> ShapedGroup:
    """Called by torch with the store, rank and size of the new group."""
    inner = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, timeout=given.timeout)
    return ShapedGroup(cast(InnerGroup, inner), options.link, timeout=given.timeout, seed=options.seed)
