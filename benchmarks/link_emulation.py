"""Is the link that --link.* emulates the one that a kernel makes? Tokens per second of the same runs on both.

    sudo python -m benchmarks.link_emulation --data TOKENS --output benchmarks/results/line_truth.json

The truth is a set of network namespaces with token buckets and a relay that holds frames for the latency. Each pair is
run alternately and several times; runs that the output holds already are not repeated. Linux and root only.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.netns.lab import KernelTestbed, missing
from tests.transport.processes import free_port, group_environment
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.link import LinkConfig
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
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
from thinpipe.core.files import write_atomically
from thinpipe.core.run_folder import events_path

STAGES, STEPS, WARM_UP = 3, 10, 3
RATES, LATENCIES = ("20mbps", "80mbps"), ("0ms", "20ms")
METHODS = {"dense bf16": None, "subspace k=16 bf16": 16}


def config(data: Path, folder: Path, width: int | None, link: LinkConfig) -> RunConfig:
    return RunConfig(
        job=JobConfig(dump_folder=folder),
        data=DataConfig(path=data),
        model=ModelSettings(
            preset="llama-tiny",
            dim=256,
            n_heads=2,
            n_kv_heads=1,
            hidden_dim=64,
            n_layers=STAGES,
            boundaries=tuple(range(1, STAGES)),
            subspace=SubspaceConfig(width=width) if width else SubspaceConfig(),
        ),
        training=TrainingConfig(steps=STEPS, global_batch_size=24, seq_len=128),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=STAGES,
            pipeline_parallel_microbatch_size=1,
            pipeline_parallel_schedule="GPipe",
            timeout_seconds=60,
        ),
        boundary=BoundaryConfig(forward="bf16", backward="bf16"),
        link=link,
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
        checkpoint=CheckpointConfig(interval=STEPS),
        validation=ValidationConfig(freq=0),
    )


def tokens_per_second(run: RunConfig) -> float:
    steps = [event for event in read_events(events_path(run.job.dump_folder)) if isinstance(event, Step)]
    return statistics.median(event.tokens_per_second for event in steps[WARM_UP:])


def command(run: RunConfig) -> list[str]:
    run.job.dump_folder.mkdir(parents=True)
    settings = run.job.dump_folder / "wanted.toml"
    settings.write_text(dump_toml(run))
    return [sys.executable, "-m", "thinpipe", "train", str(settings)]


def on_emulated_link(run: RunConfig) -> float:
    subprocess.run(command(run), check=True, capture_output=True, env=os.environ, timeout=300)
    return tokens_per_second(run)


def on_kernel_link(run: RunConfig, link: LinkConfig) -> float:
    argv = command(run)
    port = free_port()
    with KernelTestbed(STAGES, up=link.up, down=link.down, latency=link.latency) as lab:
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        machines = [
            lab.popen(rank, argv, group_environment(rank, STAGES, lab.address(0), port), **options)
            for rank in range(STAGES)
        ]
        for machine in machines:
            if machine.wait(timeout=300):
                raise RuntimeError(f"a run in the laboratory ended with code {machine.returncode}")
    return tokens_per_second(run)


def measure(data: Path, output: Path, takes: int) -> list[dict[str, object]]:
    done: list[dict[str, object]] = json.loads(output.read_text()) if output.exists() else []
    points = [
        {"method": method, "rate": rate, "latency": latency, "take": take, "line": line}
        for take, method, rate, latency, line in product(
            range(takes), METHODS, RATES, LATENCIES, ("kernel", "emulated")
        )
    ]
    known = [{key: value for key, value in point.items() if key != "tokens_per_second"} for point in done]
    for number, point in enumerate(points, 1):
        if point in known:
            continue
        link = LinkConfig(up=str(point["rate"]), down=str(point["rate"]), latency=str(point["latency"]))
        with tempfile.TemporaryDirectory() as folder:
            run = config(data, Path(folder) / "run", METHODS[str(point["method"])], link)
            speed = (
                on_emulated_link(run)
                if point["line"] == "emulated"
                else on_kernel_link(replace(run, link=LinkConfig()), link)
            )
        done.append({**point, "tokens_per_second": speed})
        write_atomically(output, json.dumps(done, indent=1).encode())
        print(f"{number}/{len(points)}  {point}: {speed:,.0f} tokens/s", flush=True)
    return done


def table(done: list[dict[str, object]]) -> str:
    rows = [
        "| method | line | one-way latency | kernel tokens/s | emulated tokens/s | emulated / kernel |",
        "|---|---|---|---:|---:|---:|",
    ]
    for method, rate, latency in product(METHODS, RATES, LATENCIES):
        speeds = {
            line: [
                float(str(point["tokens_per_second"]))
                for point in done
                if (point["method"], point["rate"], point["latency"], point["line"]) == (method, rate, latency, line)
            ]
            for line in ("kernel", "emulated")
        }
        kernel, emulated = (statistics.median(speeds[line]) for line in ("kernel", "emulated"))
        rows.append(f"| {method} | {rate} | {latency} | {kernel:,.0f} | {emulated:,.0f} | {emulated / kernel:.3f} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder made by `thinpipe tokenize`")
    parser.add_argument(
        "--output", type=Path, required=True, help="raw figures (.json); the table goes beside it (.md)"
    )
    parser.add_argument("--takes", type=int, default=3)
    options = parser.parse_args()
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    os.environ["OMP_NUM_THREADS"] = "1"
    text = table(measure(options.data, options.output, options.takes))
    print(text)
    options.output.with_suffix(".md").write_text(f"# An emulated line against one that a kernel makes\n\n{text}")


if __name__ == "__main__":
    main()
