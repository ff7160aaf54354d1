"""A hub, or a peer that measures its line to it, on a machine of a laboratory.

`python -m tests.swarm.probe_worker hub FOLDER HOST` prints where it is, and ends when its input does;
`python -m tests.swarm.probe_worker peer ADDRESS` prints what it measured.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import msgspec

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import address, hub_services
from thinpipe.swarm.peer.bandwidth_probe import measure_latency, measure_rates
from thinpipe.transport.nats.connection import Address, HubConnection


def hub(folder, host):
    with running_broker(Path(folder), ["p0"], host=host) as running, hub_services(running):
        print(json.dumps(asdict(address(running, "p0"))), flush=True)
        sys.stdin.read()


def peer(told):
    connection = HubConnection(msgspec.json.decode(told, type=Address))
    latency, began = measure_latency(connection), time.monotonic()
    rates = measure_rates(connection)
    print(json.dumps({"latency_s": latency, "took_s": time.monotonic() - began, **asdict(rates)}))
    connection.close()


if __name__ == "__main__":
    {"hub": hub, "peer": peer}[sys.argv[1]](*sys.argv[2:])
