"""Starts processes that form a group, and collects what each of them printed as JSON on its last line."""

import json
import os
import socket
import subprocess
import sys

from tests.warm import WarmProcess


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def group_environment(rank, count, address="127.0.0.1", port=None):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def start(count, module, *arguments, process=WarmProcess, env=os.environ):
    port = free_port()
    return [
        process(
            module,
            *arguments,
            env={**env, **group_environment(rank, count, port=port)},
            stdout=subprocess.PIPE,
        )
        for rank in range(count)
    ]


def cold_process(module, *arguments, **how):
    """An interpreter of its own from its start to its end."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.STDOUT, text=True, **how)


def results(workers, seconds=600, codes=None):
    """What each process reported; a failure shows the end of everybody's output, and nobody is left running."""
    try:
        printed = [worker.communicate(timeout=seconds)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    ends = [worker.returncode for worker in workers]
    assert ends == (codes or [0] * len(workers)), "\n".join([str(ends), *(text[-3000:] for text in printed)])
    return [json.loads(text.splitlines()[-1]) if text else None for text in printed]
