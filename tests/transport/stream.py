"""One of two processes that stream messages at each other; prints times and interface counters as JSON.

    python -m tests.transport.stream '[{"link": {"up": "80mbps"}, "nbytes": 30000, "count": 200, "takes": 4, ...}, ...]'

A list of jobs gives a list of lists of takes. Takes follow closely on each other, so that all but the first find TCP
connections that have opened their windows.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from thinpipe.config.link import LinkConfig
from thinpipe.transport.gloo_group import open_group

SETTLE_S = 0.06
"""For the last acknowledgement, which Linux delays by 40 ms."""
PAUSE_S = 0.06
"""Between takes. With the above less than TCP's idle limit of 200 ms, after which it starts slowly again."""


def stream(group, *, count, nbytes, ahead, one_way):
    """Both send all at once; receives are posted up to `ahead` messages before their turn."""
    peer = 1 - dist.get_rank(group)
    before = interface_nbytes()
    sends, receives = not one_way or peer == 1, not one_way or peer == 0
    buffers = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count if receives else 0)]
    message = torch.zeros(nbytes, dtype=torch.uint8)
    incoming = [group.recv([buffer], peer, 0) for buffer in buffers[:ahead]]
    start_together(peer)
    began = time.monotonic()
    outgoing = [group.send([message], peer, 0) for _ in range(count if sends else 0)]
    for number in range(len(buffers)):
        incoming[number].wait()
        if number + ahead < count:
            incoming.append(group.recv([buffers[number + ahead]], peer, 0))
    ended = time.monotonic()
    for work in outgoing:
        work.wait()
    time.sleep(SETTLE_S)
    sent, received = (after - at_first for after, at_first in zip(interface_nbytes(), before, strict=True))
    return {"began": began, "ended": ended, "sent_nbytes": sent, "received_nbytes": received}


def interface_nbytes():
    """What the interface that gloo was told to use has sent and received."""
    counters = Path("/sys/class/net", os.environ.get("GLOO_SOCKET_IFNAME", "lo"), "statistics")
    return [int((counters / name).read_text()) for name in ("tx_bytes", "rx_bytes")]


def start_together(peer):
    """At a moment of the machine's clock that process 0 names, outside the shaped group."""
    moment = torch.tensor([time.monotonic() + PAUSE_S], dtype=torch.float64)
    if peer == 1:
        dist.send(moment, 1, tag=1)
    else:
        dist.recv(moment, 0, tag=1)
    time.sleep(max(0.0, float(moment) - time.monotonic()))


def main() -> None:
    torch.set_num_threads(1)
    seen = []
    for job in json.loads(sys.argv[1]):
        group = open_group(LinkConfig(**job.pop("link")), timeout=timedelta(seconds=300))
        seen.append([stream(group, **job) for _ in range(job.pop("takes"))])
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
