"""A run with a hub, from which one of two peers is lost: killed in the middle of a step. The other goes on to the end.

`python -m tests.golden.hub STEP SECONDS join ...` is `thinpipe join ...` of a peer that may be killed: the one that
does not lead, so many seconds after the middle of its step number STEP.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.golden.data import write_tokens
from tests.golden.environment import PATIENCE, pinned_environment
from tests.golden.observe import observe_run
from thinpipe.cli import main
from thinpipe.swarm.peer.remote_run import RemoteRun

SETTINGS = """
[job]
dump_folder = "run"
[data]
path = "tokens"
[model]
preset = "llama-tiny"
dim = 32
n_heads = 2
n_kv_heads = 1
hidden_dim = 64
max_seq_len = 32
boundaries = [1, 3]
[model.subspace]
width = 4
[training]
steps = 12
global_batch_size = 4
seq_len = 16
[parallelism]
pipeline_parallel_microbatch_size = 1
[lr_scheduler]
warmup_steps = 3
[basis]
interval = 5
[boundary]
forward = "bf16"
[boundary.gradients]
kind = "quantise"
bits = 4
feedback = "ef"
[checkpoint]
interval = 4
[validation]
freq = 6
steps = 2
"""
HUB = [
    *(
        "hub",
        "run.toml",
        "--hub.peers",
        "2",
        "--hub.use-all-peers",
        "--hub.address",
        "127.0.0.1",
        "--hub.host",
        "127.0.0.1",
    ),
    *("--hub.up", "1gbps", "--hub.down", "1gbps", "--hub.patience-seconds", "0.5"),
    # Nobody is taken for lost because the machine is slow.
    *("--hub.heartbeat-timeout-seconds", "120", "--hub.stall-floor-seconds", "120"),
]


def lost_peer(folder: Path, step: int = 6, seconds: float = 0.0) -> dict[str, dict]:
    """`step` and `seconds` say when the peer is killed, which must not matter."""
    write_tokens(folder / "tokens", train=4000, validation=1000)
    (folder / "run.toml").write_text(SETTINGS)
    started: list[subprocess.Popen] = []
    try:
        hub = start(folder, "hub", "thinpipe", HUB, started)
        peers = [
            start(
                folder, name, "tests.golden.hub", [str(step), str(seconds), "join", invite, "--folder", name], started
            )
            for name, invite in zip(("anna", "bert"), invites_of(folder / "hub.out", hub), strict=True)
        ]
        ends = [program.wait(PATIENCE) for program in (hub, *peers)]
    finally:
        for program in started:
            program.kill()
            program.wait()
    printed = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.out")))
    assert (ends[0], sorted(ends[1:])) == (0, [-signal.SIGKILL, 0]), f"ended with {ends}: {printed}"
    return {"hub with a lost peer": observe_run(folder / "run")}


def start(folder: Path, name: str, module: str, arguments: list[str], started: list) -> subprocess.Popen:
    with (folder / f"{name}.out").open("wb") as output:
        command = [sys.executable, "-m", module, *arguments]
        program = subprocess.Popen(
            command, cwd=folder, env=pinned_environment(), stdout=output, stderr=subprocess.STDOUT
        )
    started.append(program)
    return program


def invites_of(output: Path, hub: subprocess.Popen) -> list[str]:
    deadline = time.monotonic() + PATIENCE
    while "another invite: " not in output.read_text():
        assert hub.poll() is None, output.read_text()
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)
    return re.findall(r"^thinpipe3:\S+", output.read_text(), re.MULTILINE)


def die_in(step: int, seconds: float) -> None:
    """Has this process killed when it computes that step, unless it leads: who leads tells the hub of the steps."""
    asked, steps = RemoteRun.asked_to_stop, iter(range(1, 1_000_000))

    def asked_to_stop(self: RemoteRun) -> bool:
        """Called in the middle of every step."""
        if not self._is_first and next(steps) == step:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if not seconds:
                time.sleep(PATIENCE)
        return asked(self)

    RemoteRun.asked_to_stop = asked_to_stop


if __name__ == "__main__":
    die_in(int(sys.argv[1]), float(sys.argv[2]))
    sys.exit(main(sys.argv[3:]))
