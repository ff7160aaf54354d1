"""What goes through the hub's server in one training step: messages, bytes, processor time, memory; by stages.

    python -m benchmarks.hub_load --output benchmarks/results/hub_load

Real pipelines of 2, 4 and 8 processes over a real nats-server with TLS; its own counters are read through its system
account before and after some steps, its processor time from the kernel (Linux). Heartbeats, two a second of every
process, depend on time and not on steps: they are taken off by count. Message counts do not depend on the machine.
"""

import asyncio
import json
import tempfile
import time
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.hub_pages import head, origin, write
from benchmarks.links.worker_pool import WorkerPool
from benchmarks.links.workload import Run, Shape
from benchmarks.nats_worker import nats_crew
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.swarm.broker.broker import Broker
from thinpipe.transport.nats.client import connect
from thinpipe.transport.nats.connection import HEARTBEAT_SECONDS
from thinpipe.transport.nats.frame import HEADER_NBYTES

STAGES = (2, 4, 8)
DIM, MICROBATCHES, SEQ_LEN = 256, 16, 128
WIDTHS = {"dense bf16": None, "k=d/8 bf16": DIM // 8, "k=d/100 bf16": 3}


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Of the server, since it started."""

    in_msgs: int
    out_msgs: int
    in_bytes: int
    out_bytes: int
    mem: int
    connections: int
    seconds: float
    """Of its processor time."""
    at: float
    """On our clock."""


def run_of(stages: int, width: int | None) -> Run:
    shape = Shape(
        stages=stages,
        blocks_per_stage=1,
        dim=DIM,
        heads=4,
        kv_heads=1,
        hidden_dim=64,
        vocab=256,
        seq_len=SEQ_LEN,
        sequences=1,
        microbatches=MICROBATCHES,
    )
    return Run(shape=shape, width=width, number_format="bf16", extra=2)


def boundary_nbytes(run: Run) -> int:
    """Of one micro-batch at one boundary, both directions, as the method states it."""
    config = run.config
    method = boundary_method(config.model.resolve(run.shape.vocab), config)
    return method.forward_nbytes + method.backward_nbytes


def law(stages: int, microbatches: int, boundary: int) -> tuple[int, int]:
    """(messages, bytes) that the server receives per step, and sends on, beside the numbers of the exchange."""
    messages = 2 * (stages - 1) * (microbatches + 1)
    return messages, (stages - 1) * microbatches * boundary + messages * HEADER_NBYTES


def read_counters(broker: Broker) -> Counters:
    counters = asyncio.run(_varz(broker))
    names = ("in_msgs", "out_msgs", "in_bytes", "out_bytes", "mem", "connections")
    return Counters(
        **{name: counters[name] for name in names}, seconds=processor_seconds(broker.server_pid), at=time.monotonic()
    )


async def _varz(broker: Broker) -> dict[str, Any]:
    client = await connect(
        broker.url, broker.fingerprint, broker.admin_credentials, inbox="_INBOX.admin", on_down=lambda _: None
    )
    try:
        answer: dict[str, Any] = json.loads((await client.request("$SYS.REQ.SERVER.PING.VARZ", timeout=5)).data)["data"]
        return answer
    finally:
        await client.close()


def processor_seconds(pid: int) -> float:
    """Of all threads that live, which are all that a server of Go ever had."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(broker: Broker, crew: WorkerPool, run: Run, steps: int) -> dict[str, Any]:
    crew.prepare([run])
    crew.time(run, 2)
    asking = _difference(read_counters(broker), read_counters(broker))
    before = read_counters(broker)
    crew.time(run, steps)
    after = read_counters(broker)
    seconds = after.at - before.at
    used = {name: value - asking[name] for name, value in _difference(before, after).items()}
    used["in_msgs"] -= run.shape.stages * seconds / HEARTBEAT_SECONDS  # heartbeats, which nobody receives here
    messages, nbytes = law(run.shape.stages, run.shape.microbatches, boundary_nbytes(run))
    return {
        "run": msgspec.to_builtins(run),
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "per_step": {name: value / steps for name, value in used.items()},
        "by_law": {"messages": messages, "bytes": nbytes},
        "memory_nbytes": after.mem,
        "connections": after.connections,
    }


def _difference(before: Counters, after: Counters) -> dict[str, float]:
    return {
        name: getattr(after, name) - getattr(before, name)
        for name in ("in_msgs", "out_msgs", "in_bytes", "out_bytes", "seconds")
    }


def processor_law(results: list[dict[str, Any]]) -> tuple[float, float]:
    """(seconds per 1,000 messages, seconds per MB) of the server's processor, both in and out: least squares."""
    rows = np.array([[r["per_step"]["in_msgs"] / 1e3, r["per_step"]["in_bytes"] / 1e6] for r in results])
    seconds = np.array([r["per_step"]["seconds"] for r in results])
    weights = 1 / seconds  # relative errors count, or the largest take decides alone
    (per_thousand, per_megabyte), *_ = np.linalg.lstsq(rows * weights[:, None], seconds * weights, rcond=None)
    return float(per_thousand), float(per_megabyte)


def measure_all(steps: int) -> list[dict[str, Any]]:
    results = []
    for stages in STAGES:
        with tempfile.TemporaryDirectory() as folder, nats_crew(Path(folder), stages) as (broker, crew):
            for name, width in WIDTHS.items():
                results.append({"name": name, **measure(broker, crew, run_of(stages, width), steps)})
                print(row(results[-1]), flush=True)
    return results


def row(result: dict[str, Any]) -> str:
    used, said = result["per_step"], result["by_law"]
    return (
        f"| {result['run']['shape']['stages']} | {result['name']} | {used['in_msgs']:.1f} | {used['out_msgs']:.1f} | "
        f"{said['messages']} | {used['in_bytes'] / 1e6:.3f} | {used['out_bytes'] / 1e6:.3f} | "
        f"{said['bytes'] / 1e6:.3f} | "
        f"{used['seconds'] * 1e3:.1f} | {result['memory_nbytes'] / 1e6:.0f} | {result['connections']} |"
    )


def page(results: list[dict[str, Any]], config: dict[str, Any]) -> str:
    per_thousand, per_megabyte = processor_law(results)
    columns = ["stages", "messages", "msgs in", "msgs out", "by law", "MB in", "MB out", "by law"]
    columns += ["server CPU ms", "server MB", "connections"]
    lines = [
        *head("Through the hub's server in one step", config),
        f"d={DIM}, {MICROBATCHES} micro-batches of 1 x {SEQ_LEN} tokens; means of {config['steps']} steps, without",
        'heartbeats. "By law": 2(S-1)(M+1) messages, and as many bytes as the boundary methods state, with a header of',
        f"{HEADER_NBYTES} bytes on each message; the rest is what the step's exchange carries (norms and losses).",
        "",
        f"| {' | '.join(columns)} |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *map(row, results),
        "",
        f"Processor time of the server, by least squares over these rows: {per_thousand * 1e3:.0f} ms per 1,000",
        f"messages and {per_megabyte * 1e3:.1f} ms per MB (a MB that comes in and goes out, TLS both times).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.md and OUTPUT.json")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    config = origin("hub_load") | {"steps": options.steps}
    results = measure_all(options.steps)
    text = page(results, config)
    print(text)
    write(options.output, text, config, results)


if __name__ == "__main__":
    main()
