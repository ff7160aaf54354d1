"""One of three processes that send each other messages over shaped lines; prints what it saw as JSON.

Moments are of the monotonic clock, which the processes of one machine share. Started by test_shaper.
"""

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from thinpipe.config.link import LinkConfig
from thinpipe.transport.gloo_group import open_group

TIMEOUT = timedelta(seconds=300)
MEGABYTE = 1_000_000


def message(nbytes, seed):
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def transfer(*transfers):
    """A scene, played three times: the fastest tells of the line, the others perhaps of a busy machine."""
    return lambda group: [exchange(group, transfers) for _ in range(3)]


def exchange(group, transfers):
    """Everybody posts its share of (source, destination, bytes) at once; who took part says when and whether intact."""
    rank = dist.get_rank(group)
    inbox = [(source, torch.empty(nbytes, dtype=torch.uint8)) for source, to, nbytes in transfers if to == rank]
    incoming = [group.recv([buffer], source, 3) for source, buffer in inbox]
    outgoing = [(to, message(nbytes, rank * 10 + to)) for source, to, nbytes in transfers if source == rank]
    dist.barrier()
    began = time.monotonic()
    sent = [group.send([buffer], to, 3) for to, buffer in outgoing]
    posted = time.monotonic()
    for _, buffer in outgoing:
        buffer.zero_()  # the group has its copy
    arrived = [wait(work) for work in incoming]
    left = [wait(work) for work in sent]
    intact = all(torch.equal(b, message(b.numel(), source * 10 + rank)) for source, b in inbox)
    return {"began": began, "posted": posted, "left": left, "arrived": arrived, "intact": intact}


def wait(work):
    assert work.wait() is True
    assert work.is_completed()
    assert work.is_success()
    return time.monotonic()


def in_order(group):
    """0 to 1 under jitter, two tags by turns."""
    count, rank = 40, dist.get_rank(group)
    if rank == 0:
        for number in range(count):
            group.send([torch.full((100,), number)], 1, number % 2)
        return {}
    if rank == 2:
        return {}
    buffers = [torch.full((100,), -1) for _ in range(count)]
    works = [group.recv([buffer], 0, number % 2) for number, buffer in enumerate(buffers)]
    moments = [wait(work) for work in works]
    return {"numbers": [int(buffer[0]) for buffer in buffers], "moments": moments}


def tags_and_limits(group):
    """1 waits for tag 1, which 0 sends when it has heard of 1, outside the group: tag 2 must not wait for it, and a
    limit that passed harms nothing."""
    rank, heard = dist.get_rank(group), torch.tensor([0])
    if rank == 0:
        group.send([torch.tensor([2])], 1, 2)
        dist.recv(heard, 1)
        group.send([torch.tensor([1])], 1, 1)
        return {}
    if rank == 2:
        return {}
    first, second = torch.tensor([0]), torch.tensor([0])
    late, early = group.recv([first], 0, 1), group.recv([second], 0, 2)
    began = time.monotonic()
    try:
        late.wait(timedelta(seconds=0.2))
    except dist.DistNetworkError as error:
        refused = str(error)
    limited = time.monotonic() - began
    early.wait()
    only_the_late_one_misses = not late.is_completed()
    dist.send(heard, 0)
    late.wait()
    return {
        "limited": limited,
        "refused": refused,
        "early": only_the_late_one_misses,
        "values": [int(first), int(second)],
    }


def asked_for_late(group):
    """1 asks for four messages long after they came: how many seconds until it has them all, of three takes."""
    rank, seconds = dist.get_rank(group), []
    for _ in range(3):
        exchange(group, [(0, 1, 1000)])
        if rank == 0:
            for _ in range(4):
                group.send([message(MEGABYTE // 4, 0)], 1, 4)
        elif rank == 1:
            time.sleep(0.3)
            began = time.monotonic()
            works = [group.recv([torch.empty(MEGABYTE // 4, dtype=torch.uint8)], 0, 4) for _ in range(4)]
            seconds.append(max(wait(work) for work in works) - began)
    return {"seconds": seconds}


def as_torch_uses_it(group):
    """c10d's own functions, and a stage of torch's pipelining for each process."""
    rank = dist.get_rank(group)
    assert dist.get_world_size(group) == 3
    assert dist.get_backend(group) == "shaped"
    assert [dist.get_global_rank(group, peer) for peer in range(3)] == [0, 1, 2]
    token = torch.tensor([rank])
    if rank == 0:
        dist.send(token, 1, group=group)
        dist.recv(token, 2, group=group)
    else:
        dist.recv(token, rank - 1, group=group)
        dist.isend(token, (rank + 1) % 3, group=group).wait()
    try:
        dist.all_reduce(torch.zeros(1), group=group)
    except NotImplementedError as error:
        refusal = str(error)

    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)]
    rows = torch.randn(6, 4, dtype=torch.float64)
    example = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    stage = PipelineStage(
        layers[rank], rank, 3, torch.device("cpu"), input_args=(example,), output_args=(example,), group=group
    )
    schedule = ScheduleGPipe(stage, 3, loss_fn=lambda out, target: (out - target).square().sum(), scale_grads=False)
    schedule.step(*([rows] if rank == 0 else []), **({"target": rows} if rank == 2 else {}))
    got = layers[rank].weight.grad.clone()
    layers[rank].zero_grad()
    (nn.Sequential(*layers)(rows) - rows).square().sum().backward()
    return {
        "token": int(token),
        "refusal": refusal,
        "gradient_error": (got - layers[rank].weight.grad).abs().max().item(),
    }


def main() -> None:
    torch.set_num_threads(1)
    even = {"up": "80mbps", "down": "80mbps"}
    scenes = {
        "rate": ({"up": "80mbps"}, transfer((0, 1, 2 * MEGABYTE))),
        "up_shared": ({"up": "80mbps"}, transfer((0, 1, MEGABYTE), (0, 2, MEGABYTE))),
        "down_shared": (even, transfer((1, 0, MEGABYTE), (2, 0, MEGABYTE))),
        "cut_through": (even, transfer((0, 1, 2 * MEGABYTE))),
        "slow_down": ({"up": "80mbps", "down": "40mbps"}, transfer((0, 1, MEGABYTE))),
        "duplex": (even, transfer((0, 1, 2 * MEGABYTE), (1, 0, 2 * MEGABYTE))),
        "latency": ({"latency": "40ms"}, transfer(*[(0, 1, 1000)] * 50)),
        "jitter": ({"latency": "5ms", "jitter": "50ms"}, in_order),
        "late": (even, asked_for_late),
        "tags": ({"latency": "1ms"}, tags_and_limits),
        "torch": ({"up": "80mbps", "latency": "2ms"}, as_torch_uses_it),
    }
    seen = {}
    for name, (link, scene) in scenes.items():
        group = open_group(LinkConfig(**link), timeout=TIMEOUT)
        seen[name] = scene(group)
        dist.barrier()
    assert open_group(LinkConfig(), timeout=TIMEOUT) is dist.group.WORLD
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
