"""Plans against reality: twelve settings over shaped links, planned and run.

    python -m benchmarks.plan_reality --data TOKENS --output benchmarks/results/plan_reality [--repeats 2]

The machine's speed and what a pass costs beside its operations are taken from two more runs behind links of 1 Gbps, of
two and of eight processes; nothing else is fitted. What emulating a link costs is thus part of the machine.
Every run is `thinpipe train` in as many processes as it has stages, each behind an emulated link. Stop it at any time:
runs that are done are not repeated. Needs a machine of its own.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil  # type: ignore[import-untyped]

from benchmarks.provenance import versions
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.link import LinkConfig
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
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
from thinpipe.planning.machines import Machine, Machines
from thinpipe.planning.model_shape import resolve_model
from thinpipe.planning.planner import Plan, make_plan

BLOCKS, WARM_UP = 8, 2


@dataclass(frozen=True)
class Setting:
    stages: int
    width: int | None
    """Of the subspace; None: dense."""
    mbps: float | None
    round_trip_ms: float
    schedule: str

    @property
    def name(self) -> str:
        line = "no line" if self.mbps is None else f"{self.mbps:g} Mbps, {self.round_trip_ms:g} ms"
        kind = "dense bf16" if self.width is None else f"subspace {self.width}, bf16"
        return f"{self.stages} stages, {kind}, {line}, {self.schedule}"


CALIBRATING = 5
"""Times that each of these is run: all that is predicted hangs on their medians."""
CALIBRATIONS = (Setting(2, None, 1000, 0, "GPipe"), Setting(8, None, 1000, 0, "GPipe"))
WITHOUT_LINES = (Setting(2, None, None, 0, "GPipe"), Setting(8, None, None, 0, "GPipe"))
"""To calibrate with instead, and see what that makes of the predictions."""
SETTINGS = (
    Setting(2, None, 5, 0, "GPipe"),
    Setting(2, None, 80, 40, "1F1B"),
    Setting(2, 16, 20, 40, "GPipe"),
    Setting(4, None, 20, 0, "1F1B"),
    Setting(4, None, 5, 40, "GPipe"),
    Setting(4, 16, 5, 40, "1F1B"),
    Setting(4, 16, 80, 0, "GPipe"),
    Setting(4, None, 80, 40, "1F1B"),
    Setting(8, None, 20, 40, "GPipe"),
    Setting(8, 16, 5, 0, "1F1B"),
    Setting(8, 16, 20, 40, "GPipe"),
    Setting(8, None, 80, 0, "1F1B"),
)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    """Of the median step after the warm-up."""
    memory_nbytes: list[int]
    """Peak of each process."""
    link_nbytes: list[int]
    """Payload of a step over each boundary and direction."""
    stolen: float
    """The share of the processors that the host gave to others meanwhile. Times of runs with much of it say little."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    flops: float
    pass_s: float = 0.0
    overhead_nbytes: int


def config_of(setting: Setting, data: Path, folder: Path, *, steps: int) -> RunConfig:
    link = LinkConfig()
    if setting.mbps is not None:
        rate = f"{setting.mbps:g}mbps"
        link = LinkConfig(up=rate, down=rate, latency=f"{setting.round_trip_ms / 2:g}ms")
    cut = BLOCKS // setting.stages
    return RunConfig(
        job=JobConfig(dump_folder=folder),
        model=ModelSettings(
            preset="llama-10m",
            max_seq_len=128,
            boundaries=tuple(range(cut, BLOCKS, cut)),
            subspace=SubspaceConfig() if setting.width is None else SubspaceConfig(width=setting.width),
        ),
        data=DataConfig(path=data),
        training=TrainingConfig(steps=steps, global_batch_size=16, seq_len=128),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=setting.stages,
            pipeline_parallel_schedule=setting.schedule,  # type: ignore[arg-type]
            pipeline_parallel_microbatch_size=2,
        ),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
        basis=BasisConfig(interval=0),
        boundary=BoundaryConfig(forward="bf16", backward="bf16"),
        link=link,
        validation=ValidationConfig(freq=0),
    )


def measure(config: RunConfig) -> Measured:
    """One real run."""
    before = psutil.cpu_times()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        settings = Path(place) / "run.toml"
        settings.write_text(dump_toml(replace(config, job=JobConfig(dump_folder=folder))))
        subprocess.run(
            [sys.executable, "-m", "thinpipe", "train", str(settings)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=900,
        )
        steps = [event for event in read_events(events_path(folder)) if isinstance(event, Step)]
    return Measured(
        seconds=median(step.seconds for step in steps[WARM_UP:]),
        memory_nbytes=steps[-1].memory,
        link_nbytes=[link.nbytes for link in steps[-1].links],
        stolen=_stolen_since(before),
    )


def _stolen_since(before: Any) -> float:
    """0 where the system does not tell."""
    after = psutil.cpu_times()
    passed = sum(after) - sum(before)
    return (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / passed if passed else 0.0


def predict(config: RunConfig, calibration: Calibration, *, cores: float) -> Plan:
    """As many processes on one machine as the run has."""
    machines = tuple(
        Machine(
            name=f"process {index}",
            flops=calibration.flops,
            memory_nbytes=1 << 40,
            up_bps=config.link.up_bps,
            down_bps=config.link.down_bps,
            latency_s=config.link.latency_s,
            host="here",
            cores=cores,
            pass_s=calibration.pass_s,
            overhead_nbytes=calibration.overhead_nbytes,
        )
        for index in range(config.parallelism.pipeline_parallel_degree)
    )
    model, _ = resolve_model(config, None)
    return make_plan(config, model, Machines(machines=machines))


def calibrate(few: tuple[RunConfig, Measured], many: tuple[RunConfig, Measured], *, cores: float) -> Calibration:
    """The speed and the cost of a pass with which two runs that links hardly hold up take as long as they did."""
    low, high = 0.0, 1.0
    for _ in range(40):
        ratio = (low + high) / 2
        flops = _speed(few, ratio, cores)
        plan = predict(many[0], Calibration(flops=flops, pass_s=ratio * _UNIT / flops, overhead_nbytes=0), cores=cores)
        low, high = (ratio, high) if plan.timeline.seconds < many[1].seconds else (low, ratio)
    flops = _speed(few, low, cores)
    return Calibration(flops=flops, pass_s=low * _UNIT / flops, overhead_nbytes=overhead_nbytes(*few))


def overhead_nbytes(config: RunConfig, measured: Measured) -> int:
    """Beside all tensors, in a process."""
    bare = predict(config, Calibration(flops=1e9, overhead_nbytes=0), cores=1.0)
    return round(
        median(
            there - machine_load.memory.total
            for there, machine_load in zip(measured.memory_nbytes, bare.machine_loads, strict=True)
        )
    )


_UNIT = 1e10
"""Operations: the ratio of `calibrate` is the cost of a pass in this unit."""


def _speed(run: tuple[RunConfig, Measured], ratio: float, cores: float) -> float:
    """With which this run takes as long as it did, when a pass costs this many times `_UNIT` operations more."""
    flops = 1e11
    for _ in range(8):  # nearly all of a step is in proportion to it
        calibration = Calibration(flops=flops, pass_s=ratio * _UNIT / flops, overhead_nbytes=0)
        flops *= predict(run[0], calibration, cores=cores).timeline.seconds / run[1].seconds
    return flops


def calibrate_from(kept: "Kept", data: Path, settings: Sequence[Setting] = CALIBRATIONS) -> Calibration:
    """With the middle one of each setting's runs."""
    few, many = (
        (
            config_of(setting, data, Path("run"), steps=kept.steps),
            sorted(kept.runs[setting.name], key=lambda run: run.seconds)[len(kept.runs[setting.name]) // 2],
        )
        for setting in settings
    )
    return calibrate(few, many, cores=kept.cores)


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    runs: list[Measured]
    seconds: float
    """Predicted."""
    memory_nbytes: list[int]
    tensors_nbytes: list[int]

    @property
    def speed_error(self) -> float:
        """Of tokens per second, against the median run."""
        return median(run.seconds for run in self.runs) / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """Of the process with the largest error."""
        errors = [
            predicted / there - 1
            for run in self.runs
            for predicted, there in zip(self.memory_nbytes, run.memory_nbytes, strict=True)
        ]
        return max(errors, key=abs)

    @property
    def noise(self) -> float:
        """The run of this setting that is farthest from the middle one."""
        middle = median(run.seconds for run in self.runs)
        return max(abs(middle / run.seconds - 1) for run in self.runs)

    def single_error(self, repeat: int) -> float:
        """As `speed_error`, against one run."""
        return self.runs[repeat].seconds / self.seconds - 1


class Kept(msgspec.Struct, kw_only=True):
    """What OUTPUT/runs.json holds."""

    versions: dict[str, Any]
    cores: float
    steps: int
    runs: dict[str, list[Measured]] = {}


def compare(setting: Setting, kept: Kept, calibration: Calibration, data: Path) -> Compared:
    config = config_of(setting, data, Path("run"), steps=kept.steps)
    plan = predict(config, calibration, cores=kept.cores)
    return Compared(
        name=setting.name,
        runs=kept.runs[setting.name],
        seconds=plan.timeline.seconds,
        memory_nbytes=[machine_load.memory.total for machine_load in plan.machine_loads],
        tensors_nbytes=[
            machine_load.memory.total - machine_load.memory.overhead for machine_load in plan.machine_loads
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by `thinpipe tokenize`")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/plan_reality"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cores", type=float, default=float(os.cpu_count() or 1))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "runs.json"
    kept = Kept(versions=versions(), cores=options.cores, steps=options.steps)
    if path.is_file():
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
        if (kept.steps, kept.cores) != (options.steps, options.cores):
            parser.error(f"{path} was begun with --steps {kept.steps} --cores {kept.cores:g}: give these, or remove it")
    wanted = dict.fromkeys((*CALIBRATIONS, *WITHOUT_LINES), CALIBRATING) | dict.fromkeys(SETTINGS, options.repeats)
    for repeat in range(max(wanted.values())):
        for setting, repeats in wanted.items():
            done = kept.runs.setdefault(setting.name, [])
            if not len(done) <= repeat < repeats:
                continue
            done.append(measure(config_of(setting, options.data, Path("run"), steps=kept.steps)))
            write_atomically(path, msgspec.json.format(msgspec.json.encode(kept)))
            took = f"{done[-1].seconds:.2f} s, {done[-1].stolen:.0%} stolen"
            print(f"{repeat + 1} of {repeats}: {setting.name}: {took}", flush=True)
    from benchmarks.plan_reality_report import report

    report(kept, options.data, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
