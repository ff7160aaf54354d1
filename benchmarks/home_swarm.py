"""Four friends at home, two of them behind routers, train through one hub: how fast, and what holds them up?

    sudo python -m benchmarks.home_swarm --output benchmarks/results/friends

Real `thinpipe hub` and `thinpipe join` in network namespaces with links shaped by the kernel
(`tests/swarm/network_namespaces.py`): every friend has 80 Mbps up and down, the hub's own link is unlimited, 80/80 or
20 up. Dense messages, and a subspace of k = d/16. The final checkpoint is compared with that of one process, file by
file. Linux and root only.
"""

import json
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hub_pages import head, origin, write
from tests.programs import Program, files_of, invites_of
from tests.reference.language import SyntheticLanguage
from tests.swarm.network_namespaces import HomeLink, Homes, Place, missing
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import Step, read_events
from thinpipe.core.run_folder import events_path
from thinpipe.data import ShardWriter, Vocabulary
from thinpipe.training.trainer import Trainer

FRIENDS, DIM, WORDS, WARM_UP = 4, 256, 64, 3
METHODS = {"dense bf16": None, "k=16 bf16": 16}
HUB_LINKS = {
    "unlimited": HomeLink(),
    "80 up, 80 down": HomeLink(up="80mbps", down="80mbps"),
    "20 up, 80 down": HomeLink(up="20mbps", down="80mbps"),
}
HOMES = [HomeLink(up="80mbps", down="80mbps", nat=bool(index % 2)) for index in range(FRIENDS)]


def config(data: Path, folder: Path, width: int | None, steps: int) -> RunConfig:
    return RunConfig(
        job=JobConfig(dump_folder=folder),
        data=DataConfig(path=data),
        model=ModelSettings(
            preset="llama-tiny",
            dim=DIM,
            n_heads=2,
            n_kv_heads=1,
            hidden_dim=64,
            n_layers=FRIENDS,
            boundaries=tuple(range(1, FRIENDS)),
            subspace=SubspaceConfig(width=width) if width else SubspaceConfig(),
        ),
        training=TrainingConfig(steps=steps, global_batch_size=24, seq_len=128),
        parallelism=ParallelismConfig(
            pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule="GPipe", timeout_seconds=120
        ),
        boundary=BoundaryConfig(forward="bf16", backward="bf16"),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
        basis=BasisConfig(interval=5),
        checkpoint=CheckpointConfig(interval=steps),
        validation=ValidationConfig(freq=0),
    )


def synthetic_tokens(folder: Path) -> Path:
    """Few words, so that there is little to compute beside what the links carry."""
    vocabulary = Vocabulary(size=WORDS, end_of_text_id=0, tokenizer_sha256="0" * 64)
    ids = SyntheticLanguage(WORDS, seed=1).batch(0, 1, 80_000)[0].numpy().astype(np.uint32)
    for side, part in (("train", ids[:70_000]), ("validation", ids[70_000:])):
        with ShardWriter(folder / side, vocabulary, source="synthetic", max_shard_tokens=1_000_000) as writer:
            writer.add(part, text_nbytes=(len(part) + 1) * 3)
            writer.finish()
    return folder


def steps_of(run: RunConfig) -> list[Step]:
    path = events_path(run.job.dump_folder)
    return [event for event in read_events(path) if isinstance(event, Step)] if path.exists() else []


def status_of(run: RunConfig, hub: Place) -> dict[str, Any]:
    command = [sys.executable, "-m", "thinpipe", "status", str(run.job.dump_folder), "--json"]
    status: dict[str, Any] = json.loads(hub.run(command, seconds=60).stdout)
    return status


def wait_for_step(run: RunConfig, step: int, hub: Program, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while len(steps_of(run)) < step:
        if hub.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"step {step} did not come: {hub.printed[-2000:]}")
        time.sleep(0.1)


def together(run: RunConfig, hub_link: HomeLink, folder: Path) -> dict[str, Any]:
    """One run of all friends, and what was seen of it."""
    file = folder / "run.toml"
    file.write_text(dump_toml(run))
    programs = []
    with Homes(HOMES, hub=hub_link) as net:
        try:
            arguments = ("--hub.peers", FRIENDS, "--hub.use-all-peers", "--hub.address", net.hub.address)
            hub = Program(folder, "hub", "hub", file, *arguments, place=net.hub)
            programs.append(hub)
            for index, (home, invite) in enumerate(zip(net.homes, invites_of(hub), strict=True)):
                name = f"home{index}"
                programs.append(Program(folder, name, "join", invite, "--folder", folder / name, place=home))
            wait_for_step(run, 1, hub)
            until_first = net.hub.counters()
            wait_for_step(run, WARM_UP, hub)
            early, early_step = net.hub.counters(), len(steps_of(run))
            status = status_of(run, net.hub)
            wait_for_step(run, run.training.steps - 1, hub)
            late, late_step = net.hub.counters(), len(steps_of(run))
            codes = [program.finish(200) for program in programs]
            at_end = net.hub.counters()
        finally:
            for program in programs:
                program.stop()
    if any(codes):
        raise RuntimeError(f"ended with {codes}: {[program.printed[-500:] for program in programs]}")
    speeds = [step.tokens_per_second for step in steps_of(run)[WARM_UP:]]
    steps = late_step - early_step
    return {
        "tokens_per_second": statistics.median(speeds),
        "spread": [min(speeds), max(speeds)],
        "slowest_part": status["bottleneck"],
        "hub_mbps_measured": [bps / 1e6 for bps in status["hub_bps"]],
        "peers": status["peers"],
        "hub_up_nbytes_per_step": (late["tx_bytes"] - early["tx_bytes"]) / steps,
        "hub_down_nbytes_per_step": (late["rx_bytes"] - early["rx_bytes"]) / steps,
        "hub_up_nbytes_before_first_step": until_first["tx_bytes"],
        "hub_down_nbytes_last_checkpoint": at_end["rx_bytes"] - late["rx_bytes"],
    }


def measure_all(steps: int) -> list[dict[str, Any]]:
    results = []
    for method, width in METHODS.items():
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            alone = config(synthetic_tokens(folder / "tokens"), folder / "alone", width, steps)
            Trainer(alone).train()
            wanted = files_of(alone, steps)
            for name, hub_link in HUB_LINKS.items():
                part = folder / name.replace(" ", "_").replace(",", "")
                part.mkdir()
                run = replace(alone, job=JobConfig(dump_folder=part / "through_hub"))
                result = {"method": method, "hub_line": name, **together(run, hub_link, part)}
                result["equal_to_one_process"] = files_of(run, steps) == wanted
                results.append(result)
                print(row(result), flush=True)
    return results


def row(result: dict[str, Any]) -> str:
    low, high = result["spread"]
    up, down = result["hub_mbps_measured"]
    return (
        f"| {result['method']} | {result['hub_line']} | {result['tokens_per_second']:,.0f} | "
        f"{low:,.0f} to {high:,.0f} | "
        f"{result['hub_up_nbytes_per_step'] / 1e6:.2f} / {result['hub_down_nbytes_per_step'] / 1e6:.2f} | "
        f"{up:.0f} / {down:.0f} | {result['slowest_part']} | {'yes' if result['equal_to_one_process'] else 'NO'} |"
    )


def page(results: list[dict[str, Any]], provenance: dict[str, Any]) -> str:
    lines = [
        *head("Four friends and a hub on links emulated by the kernel", provenance),
        f"d={DIM}, {FRIENDS} blocks, one for each friend, {WORDS} words, 24 micro-batches of 128 tokens, GPipe.",
        "Friends have 80 Mbps up and down, two are behind NAT. All on one machine of two cores, which others used",
        f"too: where processors decide, speeds are low. Medians of {provenance['steps'] - WARM_UP} steps; bytes are as",
        "the hub's interface counted them, TLS and TCP included.",
        "",
        "| messages | hub's link, Mbps | tokens/s | spread | hub MB up / down per step | hub's link as measured by the "
        "run, Mbps up / down | `thinpipe status`: slowest part | equal to one process |",
        "|---|---|---:|---:|---:|---:|---|---|",
        *map(row, results),
        "",
        *(
            f"- {result['method']}, {result['hub_line']}: until the end of the first step the hub sent "
            f"{result['hub_up_nbytes_before_first_step'] / 1e6:.1f} MB (measuring links, first weights, one step); "
            f"the last step and the checkpoint brought it {result['hub_down_nbytes_last_checkpoint'] / 1e6:.1f} MB."
            for result in results
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="writes OUTPUT.md and OUTPUT.json")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    provenance = origin("home_swarm") | {"steps": options.steps}
    results = measure_all(options.steps)
    text = page(results, provenance)
    print(text)
    write(options.output, text, provenance, results)


if __name__ == "__main__":
    main()
