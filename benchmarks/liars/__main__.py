"""Which liars does a run notice, when, and by what?

    python -m benchmarks.liars --output benchmarks/results/liars

For every lie of `benchmarks/liars/lies.py` a real `thinpipe hub` and three real `thinpipe join` on loopback train a
small model, and one of the three lies. The hub watches the boundaries while they train. Its commits are all kept and
audited afterwards, each as the hub does it (`swarm.hub.loss_audit`), so that what is found does not depend on how much
time this machine had for it. A finished lie has a file in the output folder and is not run again.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.command_line import run_benchmark
from benchmarks.liars.lies import LIES
from benchmarks.provenance import versions
from tests.device.sim import environment
from tests.programs import Program, hub_arguments, invites_of
from tests.reference.language import SyntheticLanguage
from thinpipe.checkpoint import Checkpoint
from thinpipe.checkpoint.state import layers_by_segment
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.config.toml import dump_toml
from thinpipe.core.audit_events import AuditEvent, BoundaryAlarm, CommitMeasured
from thinpipe.core.events import Step, read_events
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.core.run_folder import checkpoints_path, events_path
from thinpipe.data import Cursor, ShardWriter, Vocabulary
from thinpipe.models import build
from thinpipe.swarm.hub.commit_losses import MeasuredCommit
from thinpipe.swarm.hub.loss_audit import LossAudit
from thinpipe.training.data_loading import LocalTokens
from thinpipe.training.recomputed_loss import loss_band, recompute_losses

WORDS, STEPS_PER_COMMIT = 64, 10


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Liars in real runs."""

    output: Path = Path("benchmarks/results/liars")
    """Folder of the results."""
    lies: tuple[str, ...] = tuple(LIES)
    """Names of the lies."""
    steps: int = 200
    """Steps of each run."""
    seed: int = 1
    """Seed of data and weights."""
    nice: int = 10
    """Niceness of all programs."""
    second_device: bool = False
    """The second of the peers computes on the test device `sim`, and without vector instructions: devices differ."""


def config(data: Path, folder: Path, settings: Settings) -> RunConfig:
    return RunConfig(
        job=JobConfig(dump_folder=folder),
        data=DataConfig(path=data),
        model=ModelSettings(
            preset="llama-tiny",
            dim=32,
            n_heads=2,
            n_kv_heads=1,
            hidden_dim=64,
            n_layers=3,
            boundaries=(1, 2),
            subspace=SubspaceConfig(width=8),
        ),
        training=TrainingConfig(steps=settings.steps, global_batch_size=8, seq_len=32, device="cpu"),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2, timeout_seconds=600),
        boundary=BoundaryConfig(forward="bf16", backward="bf16"),
        lr_scheduler=LRSchedulerConfig(warmup_steps=10),
        basis=BasisConfig(interval=100),
        checkpoint=CheckpointConfig(interval=STEPS_PER_COMMIT, keep_latest_k=0),
        validation=ValidationConfig(freq=0),
        debug=DebugConfig(seed=settings.seed),
    )


def synthetic_tokens(folder: Path, seed: int) -> Path:
    vocabulary = Vocabulary(size=WORDS, end_of_text_id=0, tokenizer_sha256="0" * 64)
    ids = SyntheticLanguage(WORDS, seed=seed).batch(0, 1, 80_000)[0].numpy().astype("uint32")
    with ShardWriter(folder / "train", vocabulary, source="synthetic", max_shard_tokens=1_000_000) as writer:
        writer.add(ids, text_nbytes=(len(ids) + 1) * 3)
        writer.finish()
    return folder


@contextmanager
def programs(folder: Path) -> Iterator[Any]:
    started: list[Program] = []

    def start(name: str, *arguments: Any, **more: Any) -> Program:
        started.append(Program(folder, name, *arguments, **more))
        return started[-1]

    try:
        yield start
    finally:
        for program in started:
            program.stop()


def run_lie(name: str, settings: Settings, folder: Path) -> dict[str, Any]:
    run = config(synthetic_tokens(folder / "data", settings.seed), folder / "run", settings)
    file = folder / "run.toml"
    file.write_text(dump_toml(run))
    with programs(folder) as start:
        fast = ("--hub.up", "1gbps", "--hub.down", "1gbps", "--hub.audit-share", "0")
        hub = start("hub", *hub_arguments(file, 3, *fast))
        invites = invites_of(hub)
        for peer, invite in zip(("anna", "zoe"), invites, strict=False):
            device = "sim" if settings.second_device and peer == "zoe" else "cpu"
            of_device = environment(ATEN_CPU_CAPABILITY="default") if device == "sim" else None
            where: tuple[Any, ...] = ("--folder", folder / peer, "--name", peer, "--device", device)
            start(peer, "join", invite, *where, environment=of_device)
        where = ("join", invites[2], "--folder", folder / "mallory", "--name", "mallory", "--device", "cpu")
        start("mallory", f"benchmarks.liars.lies:{name}", *where, module="tests.swarm.hostile.dishonest")
        began = time.monotonic()
        while hub.process.poll() is None and time.monotonic() - began < 3600:
            time.sleep(1)
        if hub.process.poll() != 0:
            raise RuntimeError(f"{name}: the hub did not finish: {hub.printed[-3000:]}")
    return summary(name, run, settings, time.monotonic() - began)


def audited(run: RunConfig) -> list[AuditEvent]:
    """What the hub finds that has time for every commit."""
    events, source = list(read_events(events_path(run.job.dump_folder))), LocalTokens(run)
    (begun,) = (event for event in events if isinstance(event, GenerationStarted))
    steps = [event for event in events if isinstance(event, Step)]
    own_batch = source.batch(Cursor(samples_seen=1_000_003))
    found: list[AuditEvent] = []
    with tempfile.TemporaryDirectory() as folder:
        audit = LossAudit(Path(folder), share=1.0, band=loss_band(run))
        audit.reported.on_generation(0, [peer.name for peer in begun.peers])
        layers = layers_by_segment(build(run.model.resolve(WORDS)), None)
        audit.changes.on_generation(
            {layer: peer.name for peer in begun.peers for segment in peer.segments for layer in layers[segment]}
        )
        for path in sorted(checkpoints_path(run.job.dump_folder).glob("step-*")):
            checkpoint = Checkpoint.open(path)
            step, began = checkpoint.manifest.step, time.monotonic()
            while steps and steps[0].step <= step + 1:
                audit.on_step(steps.pop(0))
            losses = recompute_losses(checkpoint, source, own_batch)
            measured = MeasuredCommit(step=step, **asdict(losses))
            found += audit.findings(measured, time.monotonic() - began)
    return found


def summary(name: str, run: RunConfig, settings: Settings, seconds: float) -> dict[str, Any]:
    events = list(read_events(events_path(run.job.dump_folder)))
    steps = [event for event in events if isinstance(event, Step)]
    checks = audited(run) + [event for event in events if isinstance(event, BoundaryAlarm)]
    first: dict[str, dict[str, Any]] = {}
    for event in checks:
        if event.is_disputed:
            kind = str(event.__struct_config__.tag)
            first.setdefault(kind, msgspec.to_builtins(event) | {"count": 0})["count"] += 1
    return {
        "lie": name,
        "what": (LIES[name].__doc__ or "").strip(),
        "seed": settings.seed,
        "second_device": settings.second_device,
        "versions": versions(),
        "places": [
            {"name": peer.name, "segments": peer.segments, "device_class": peer.device_class}
            for event in events
            if isinstance(event, GenerationStarted)
            for peer in event.peers
        ],
        "seconds": seconds,
        "steps": len(steps),
        "commits": sum(isinstance(event, CommitMeasured) for event in checks),
        "losses": [step.loss for step in steps],
        "first_alarms": first,
        "checks": [msgspec.to_builtins(event) for event in checks],
    }


def main(settings: Settings) -> None:
    settings.output.mkdir(parents=True, exist_ok=True)
    os.nice(settings.nice)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that its programs end too
    for name in settings.lies:
        place = settings.output / f"{name}_{settings.seed}{'_sim' if settings.second_device else ''}.json"
        if place.exists():
            continue
        with tempfile.TemporaryDirectory(prefix="liars-") as folder:
            found = run_lie(name, settings, Path(folder))
        place.write_text(json.dumps(found, indent=1) + "\n")
        seen = ", ".join(f"{kind} at step {event['step']}" for kind, event in found["first_alarms"].items())
        print(f"{name}: {seen or 'not seen'} ({found['steps']} steps, {found['seconds']:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(run_benchmark("liars", Settings, main))
