"""One of two processes on a broker: the first sends messages, a few at a time, the second checks each of them."""

import json
import os
import sys
from collections import deque
from datetime import timedelta

import torch

from tests.transport.nats_peers import ORIGIN
from thinpipe.transport.nats.client import Credentials
from thinpipe.transport.nats.connection import Address, HubConnection
from thinpipe.transport.nats.world import open_nats_group

MESSAGES, NBYTES, AT_ONCE = 400, 1 << 20, 32


def main() -> None:
    rank, told = int(os.environ["RANK"]), json.loads(os.environ["BROKER"])
    names = list(told["credentials"])
    address = Address(
        url=told["url"],
        fingerprint=told["fingerprint"],
        name=names[rank],
        credentials=Credentials(**told["credentials"][names[rank]]),
    )
    group = open_nats_group(HubConnection(address), names, ORIGIN, timeout=timedelta(seconds=600))
    in_flight: deque[tuple[torch.Tensor, torch.distributed.Work]] = deque()
    for number in range(MESSAGES):
        if len(in_flight) == AT_ONCE:
            finish(in_flight.popleft(), rank, number - AT_ONCE)
        message = torch.full((NBYTES,), number % 251, dtype=torch.uint8) if rank == 0 else torch.empty(NBYTES).byte()
        work = group.send([message], 1, 7) if rank == 0 else group.recv([message], 0, 7)
        in_flight.append((message, work))
        if number == AT_ONCE:
            print("begun", flush=True)
    for number in range(MESSAGES - len(in_flight), MESSAGES):
        finish(in_flight.popleft(), rank, number)
    print("all came" if rank else "all left", flush=True)
    group.barrier()
    group.connection.close()


def finish(transfer: tuple[torch.Tensor, torch.distributed.Work], rank: int, number: int) -> None:
    message, work = transfer
    work.wait()
    if rank == 1 and not (message == number % 251).all():
        sys.exit(f"message {number} is not what was sent")


if __name__ == "__main__":
    main()
