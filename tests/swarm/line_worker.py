"""A hub, or a peer that measures its line to it, on a machine of a laboratory.

`python -m tests.swarm.line_worker hub FOLDER HOST` prints where it is, and ends when its input does;
`python -m tests.swarm.line_worker peer ADDRESS` prints what it measured.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import address, hub_services
from thinpipe.swarm.line_test import measure_latency, measure_rates
from thinpipe.transport.nats.post import Address, Post


def hub(folder, host):
    with running_broker(Path(folder), ["p0"], host=host) as running, hub_services(running):
        print(json.dumps(asdict(address(running, "p0"))), flush=True)
        sys.stdin.read()


def peer(told):
    post = Post(msgspec.json.decode(told, type=Address))
    latency, began = measure_latency(post), time.monotonic()
    rates = measure_rates(post)
    print(json.dumps({"latency_s": latency, "took_s": time.monotonic() - began, **asdict(rates)}))
    post.close()


if __name__ == "__main__":
    {"hub": hub, "peer": peer}[sys.argv[1]](*sys.argv[2:])
