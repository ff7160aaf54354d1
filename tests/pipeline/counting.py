"""A process group on gloo that counts what it is given to send: what is handed to a transport, seen from there."""

from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class CountingGroup(dist.ProcessGroup):
    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.messages: Counter[tuple[int, int]] = Counter()
        """How many of each tag and number of bytes."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self.messages[tag, tensor.numel() * tensor.element_size()] += 1
        return self.inner.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> dist.Work:
        return self.inner.recv(tensors, src, tag)


def open_counting_group(seconds: float) -> CountingGroup:
    def create(given: Any, _options: Any) -> CountingGroup:
        return CountingGroup(
            dist.ProcessGroupGloo(given.store, given.group_rank, given.group_size, timeout=given.timeout)
        )

    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    dist.Backend.register_backend("counting", create, extended_api=True, devices=["cpu"])
    group: CountingGroup = dist.new_group(backend="counting", timeout=timedelta(seconds=seconds))
    return group
