"""Which runs the study has: one base, then the same tuning with one boundary after the other, with three seeds.

All tunings share the base and, seed by seed, the order of the data. The base is dense, with fp32 boundaries: it has the
giant channels that its own training gave it, and nothing was planted. All is computed in float32: what a boundary costs
is then not hidden under other roundings, and processors without products in bfloat16 are three times as fast so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from thinpipe.boundary.contract import MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.run import (
    CheckpointConfig,
    DataConfig,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    MetricsConfig,
    ModelSettings,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)

VOCABULARY, SEQ_LEN = 4096, 128
BASE_BATCH, BATCH, MICROBATCH = 16, 8, 4
MODEL = ModelSettings(preset="llama-10m", n_layers=12, max_seq_len=SEQ_LEN, boundaries=(3, 6, 9))
BASE_FOLDER, TASK_FOLDER = "base-weights", "task"
"""In the work folder: the weights that every tuning starts from, and the tokens of the other task."""
BASE_LR, LR, SEEDS = 1.5e-3, 5e-4, (0, 1, 2)
TOKENS_PER_CORE_SECOND, SECONDS_BESIDE = 950.0, 45.0
"""Roughly, on a core that is shared with others, for the estimate: in training, and a run's start and validations."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model and of all runs: those of the study, unless others are given."""

    model: ModelSettings = MODEL
    base_steps: int = 1024
    steps: int = 256
    validation_samples: int = 128

    @property
    def width(self) -> int:
        return self.model.resolve(VOCABULARY).state_width

    @property
    def samples(self) -> int:
        """Every sample of the task is seen once."""
        return self.steps * BATCH


FULL = Sizes()
SMOKE = Sizes(
    model=ModelSettings(
        preset="llama-10m",
        dim=64,
        n_layers=4,
        n_heads=2,
        n_kv_heads=1,
        hidden_dim=128,
        max_seq_len=SEQ_LEN,
        boundaries=(1, 2, 3),
    ),
    base_steps=12,
    steps=12,
    validation_samples=8,
)
"""A minute of work, to see that the command works on a machine."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """Training of the base on books."""

    sizes: Sizes = FULL
    key: str = "base"
    trunk: ClassVar[None] = None

    @property
    def steps(self) -> int:
        return self.sizes.base_steps

    @property
    def tokens(self) -> int:
        return self.steps * BASE_BATCH * SEQ_LEN

    def config(self, data: Path, folder: Path) -> RunConfig:
        return RunConfig(
            job=JobConfig(dump_folder=folder),
            model=self.sizes.model,
            data=DataConfig(path=data),
            training=training(self.steps, BASE_BATCH),
            parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=MICROBATCH),
            optimizer=OptimizerConfig(lr=BASE_LR),
            lr_scheduler=LRSchedulerConfig(warmup_steps=max(1, self.steps // 20)),
            checkpoint=CheckpointConfig(interval=256, keep_latest_k=1),
            validation=ValidationConfig(freq=max(1, self.steps // 4), steps=10),
            metrics=MetricsConfig(log_freq=64),
        )


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Tuning of the whole base on the other task."""

    name: str
    """Of its boundary; runs that differ in the seed alone share it."""
    boundary: BoundaryConfig
    seed: int = 0
    lr: float = LR
    sizes: Sizes = FULL
    trunk: ClassVar[None] = None

    @property
    def key(self) -> str:
        words = f"{self.name} lr {self.lr:g} seed {self.seed}"
        return "".join(c if c.isalnum() or c in ".-+" else "_" for c in words)

    @property
    def steps(self) -> int:
        return self.sizes.steps

    @property
    def tokens(self) -> int:
        return self.steps * BATCH * SEQ_LEN

    def config(self, data: Path, folder: Path) -> RunConfig:
        return RunConfig(
            job=JobConfig(dump_folder=folder),
            model=ModelSettings(initial=folder.parent / BASE_FOLDER),
            data=DataConfig(path=data),
            training=training(self.steps, BATCH),
            parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=MICROBATCH),
            optimizer=OptimizerConfig(lr=self.lr),
            lr_scheduler=LRSchedulerConfig(warmup_steps=max(1, self.steps // 20)),
            boundary=self.boundary,
            checkpoint=CheckpointConfig(interval=self.steps, keep_latest_k=1),
            validation=ValidationConfig(freq=max(1, self.steps // 4), steps=0),
            metrics=MetricsConfig(log_freq=64),
            debug=DebugConfig(seed=self.seed),
        )

    @property
    def nbytes_per_token(self) -> tuple[float, float]:
        """At each boundary, forward with ids and back, as the method states it."""
        shape = MessageShape(
            batch=MICROBATCH, tokens=SEQ_LEN, width=self.sizes.width, vocab_size=VOCABULARY, dtype=torch.float32
        )
        method = make_method(self.boundary, shape, in_subspace=False, seed=0)
        return method.forward_nbytes / shape.rows, method.backward_nbytes / shape.rows


def training(steps: int, batch: int) -> TrainingConfig:
    return TrainingConfig(steps=steps, global_batch_size=batch, seq_len=SEQ_LEN, precision="fp32")


def both(bits: int, **settings: int | str | bool) -> BoundaryConfig:
    """The same integers in both directions."""
    compression = CompressionConfig(kind="quantise", bits=bits, **settings)  # type: ignore[arg-type]
    return BoundaryConfig(states=compression, gradients=compression)


INT8, ROTATED_INT8 = both(8, per="token"), both(8, per="token", rotate=True)
INT4, ROTATED_INT4 = both(4, tile=128), both(4, tile=128, rotate=True)
BOUNDARIES: dict[str, BoundaryConfig] = {
    "fp32": BoundaryConfig(),
    "bf16": BoundaryConfig(forward="bf16", backward="bf16"),
    "int8": INT8,
    "int8 rotated": ROTATED_INT8,
    "preset tuning": BoundaryConfig(preset="tuning"),
    "int8 states, int4 rotated gradients": BoundaryConfig(states=INT8.states, gradients=ROTATED_INT4.gradients),
    "int4": INT4,
    "int4 rotated": ROTATED_INT4,
    "preset tuning-thin": BoundaryConfig(preset="tuning-thin"),
}
WHOLE = "fp32"
"""What all others are compared with."""


def runs(sizes: Sizes = FULL) -> Iterator[Tuning]:
    """Everything with the first seed, then with the others; last, other learning rates without compression."""
    for seed in SEEDS:
        for name, boundary in BOUNDARIES.items():
            yield Tuning(name=name, boundary=boundary, seed=seed, sizes=sizes)
    for lr in (LR / 3, LR * 3):
        yield Tuning(name="learning rate", boundary=BOUNDARIES[WHOLE], lr=lr, sizes=sizes)


def smoke_runs() -> list[Tuning]:
    """One seed of three boundaries."""
    few = (WHOLE, "preset tuning", "preset tuning-thin")
    return [replace(run, sizes=SMOKE) for run in runs() if run.name in few and run.seed == SEEDS[0]]


def core_minutes(run: Base | Tuning) -> float:
    return (run.tokens / TOKENS_PER_CORE_SECOND + SECONDS_BESIDE) / 60
