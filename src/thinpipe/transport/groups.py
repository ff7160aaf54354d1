"""Opens the process group of a run: gloo as it is, or with a home line in front of every process."""

from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch.distributed as dist

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
        dist.init_process_group("gloo", timeout=timeout)
    world = dist.group.WORLD
    assert world is not None
    if not link.is_shaped:
        return world
    if SHAPED not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHAPED, _create, extended_api=True, devices=["cpu"])
    group: dist.ProcessGroup = dist.new_group(backend=SHAPED, timeout=timeout, pg_options=_Options(link, seed))
    return group


def _create(given: Any, options: _Options) -> ShapedGroup:
    """Called by torch with the store, rank and size of the new group."""
    inner = dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, timeout=given.timeout)
    return ShapedGroup(cast(InnerGroup, inner), options.link, timeout=given.timeout, seed=options.seed)
