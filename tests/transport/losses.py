"""Three processes over shaped lines: 1 ends early, 2 is killed, and 0 prints how it learns of both, as JSON.

Works that nobody waits for are left behind everywhere: no interpreter may stay for them, and no thread may wake from
one while its interpreter ends, which would abort it. Started by test_shaper.
"""

import atexit
import json
import os
import signal
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from thinpipe.config.link import LinkConfig
from thinpipe.transport.gloo_group import open_group


def error_of(work):
    began = time.monotonic()
    try:
        work.wait()
    except dist.DistNetworkError as error:
        return {"error": str(error), "seconds": time.monotonic() - began}
    return {"error": None}


def survive(group):
    last_words, never = torch.empty(1), torch.empty(1000)
    farewell = group.recv([last_words], 1, 5)
    missing = [group.recv([never], 2, tag) for tag in (1, 1, 2)]
    for peer in (1, 2):
        group.send([torch.ones(1)], peer, 0).wait()
    receiving = [error_of(work) for work in missing]
    farewell.wait()
    time.sleep(0.1)  # for the first send to a dead peer to reach it
    sending = [error_of(group.send([never], 2, 0)) for _ in range(2)]
    return {"last_words": float(last_words), "receiving": receiving, "sending": sending}


def leave(group):
    """With a message on its way out, which must still arrive, and receives that never end."""
    for tag in range(100, 200):
        group.recv([torch.empty(1)], 0, tag)
    group.recv([torch.empty(1)], 0, 0).wait()
    group.send([torch.tensor([7.0])], 0, 5).wait()
    return {}


def die(group):
    group.recv([torch.empty(1)], 0, 0).wait()
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    report = {}
    atexit.register(tell, report)  # before the group, so that it is called when the group has been closed
    link = LinkConfig(up="80mbps", down="80mbps", latency="50ms")
    group = open_group(link, timeout=timedelta(seconds=300))
    report |= (survive, leave, die)[dist.get_rank(group)](group)


def tell(report):
    report["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinpipe-")]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
