"""Process groups that count what they are given to send: what is handed to a transport, seen from there."""

import json
import os
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.transport.nats_peers import ORIGIN
from thinpipe.transport.nats.client import Credentials
from thinpipe.transport.nats.connection import Address, HubConnection
from thinpipe.transport.nats.group import NatsGroup
from thinpipe.transport.nats.world import open_nats_group


class CountingGroup(dist.ProcessGroup):
    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner = inner
        self.messages: Counter[tuple[int, int]] = Counter()
        """How many of each tag and number of bytes."""
        self.unsent: list[dist.Work] = []
        self.max_unsent = 0
        """Most messages under way at once."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        self.messages[tag, tensor.numel() * tensor.element_size()] += 1
        work = self.inner.send(tensors, dst, tag)
        self.unsent = [*(sent for sent in self.unsent if not sent.is_completed()), work]
        self.max_unsent = max(self.max_unsent, len(self.unsent))
        return work

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


def open_counting_nats_group(seconds: float) -> NatsGroup:
    """With a broker whose address and credentials are in the environment."""
    told = json.loads(os.environ["BROKER"])
    names = list(told["credentials"])
    name = names[int(os.environ["RANK"])]
    address = Address(
        url=told["url"],
        fingerprint=told["fingerprint"],
        name=name,
        credentials=Credentials(**told["credentials"][name]),
    )
    group = open_nats_group(HubConnection(address), names, ORIGIN, timeout=timedelta(seconds=seconds))
    messages: Counter[tuple[int, int]] = Counter()
    push = group.send

    def send(tensors: list[torch.Tensor], dst: int, tag: int) -> dist.Work:
        (tensor,) = tensors
        messages[tag, tensor.numel() * tensor.element_size()] += 1
        return push(tensors, dst, tag)

    group.send, group.messages = send, messages
    return group
