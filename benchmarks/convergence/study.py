"""One run of the study: what it asks, and its settings. All share model, data order, optimiser and batch."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from thinpipe.boundary.contract import BoundaryMethod, MessageShape
from thinpipe.boundary.registry import make_method
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.model import ExecutionConfig, ProjectionConfig, SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
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
from thinpipe.models import build

PRESET, DIM, VOCABULARY = "llama-10m", 256, 4096
BATCH, MICROBATCH, TOKENS = 16, 4, 128
TOKENS_PER_STEP = BATCH * TOKENS
DENSE = BoundaryConfig(forward="bf16", backward="bf16")
"""What an ordinary pipeline sends, and every ratio of bytes is against."""
FIRST_BASIS = BasisConfig(interval=0)
NO_PROJECTION = ProjectionConfig()
SHAPE = ModelSettings(preset=PRESET)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Lower priorities come first."""

    question: str
    """Runs with the same one share a table."""
    name: str
    priority: int
    tokens: int
    kind: str
    """Of the methods that share a learning rate."""
    lr: float
    seed: int = 0
    width: int | None = None
    """k; None: a dense model."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    """Beside the width."""
    matched: bool = False
    """The MLPs are widened until the model trains as many numbers as the dense one."""
    boundary: BoundaryConfig = DENSE
    basis: BasisConfig = FIRST_BASIS
    second_moment: str = "row"
    cuts: tuple[int, ...] = (2, 4, 6)
    projection: ProjectionConfig = NO_PROJECTION
    """Free blocks; set this or `width`."""
    shape: ModelSettings = SHAPE
    """Beside what is above."""
    microbatch: int = MICROBATCH
    seq_len: int = TOKENS
    """Tokens per sequence; a step has BATCH sequences."""
    schedule: LRSchedulerConfig | None = None
    """None: a twentieth of the steps to warm up, then a cosine."""
    trunk: "Study | None" = None
    """The run whose last step this one goes on from; else it begins anew."""
    compiled: bool = False
    """Blocks go through torch.compile: other roundings, less time."""
    autocast: bool = True
    """Products are in bfloat16. Not every processor has them; on others float32 is faster."""

    @property
    def key(self) -> str:
        """The name of its files."""
        words = f"{self.question} {self.name} lr {self.lr:g} {self.tokens // 1024}k seed {self.seed}"
        return "".join(c if c.isalnum() or c in ".-+" else "_" for c in words)

    @property
    def steps(self) -> int:
        return self.tokens // self.tokens_per_step

    @property
    def tokens_per_step(self) -> int:
        return BATCH * self.seq_len

    @property
    def model(self) -> ModelSettings:
        section = replace(self.shape, max_seq_len=self.seq_len, boundaries=self.cuts, projection=self.projection)
        if self.width is not None:
            section = replace(section, subspace=replace(self.subspace, width=self.width))
        return replace(section, hidden_dim=matched_hidden_dim(section)) if self.matched else section

    def config(self, data: Path, folder: Path) -> RunConfig:
        return RunConfig(
            job=JobConfig(dump_folder=folder),
            model=self.model,
            data=DataConfig(path=data),
            training=TrainingConfig(
                steps=self.steps,
                global_batch_size=BATCH,
                seq_len=self.seq_len,
                precision="bf16-mixed" if self.autocast else "fp32",
            ),
            parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=self.microbatch),
            optimizer=OptimizerConfig(lr=self.lr, second_moment=self.second_moment),  # type: ignore[arg-type]
            lr_scheduler=self.schedule or LRSchedulerConfig(warmup_steps=max(1, self.steps // 20)),
            basis=self.basis,
            boundary=self.boundary,
            execution=ExecutionConfig(compile=self.compiled),
            checkpoint=CheckpointConfig(interval=256, keep_latest_k=1),
            validation=ValidationConfig(freq=min(self.steps, max(64, self.steps // 8)), steps=20),
            metrics=MetricsConfig(log_freq=64),
            debug=DebugConfig(seed=self.seed),
        )

    @property
    def method(self) -> BoundaryMethod:
        """Of each of its boundaries."""
        width = self.model.resolve(VOCABULARY).state_width
        shape = MessageShape(
            batch=self.microbatch, tokens=self.seq_len, width=width, vocab_size=VOCABULARY, dtype=torch.float32
        )
        return make_method(self.boundary, shape, in_subspace=self.width is not None, seed=self.seed)

    @property
    def nbytes_per_token(self) -> float:
        """That cross each boundary, in both directions, ids and scales included."""
        return (self.method.forward_nbytes + self.method.backward_nbytes) / (self.microbatch * self.seq_len)


@cache
def trainable(section: ModelSettings) -> int:
    return sum(parameter.numel() for parameter in build(section.resolve(VOCABULARY)).parameters())


@cache
def matched_hidden_dim(section: ModelSettings) -> int:
    """The width of the MLPs with which the model trains as many numbers as the dense one of its shape."""
    wanted = trainable(replace(section, subspace=SubspaceConfig(), projection=NO_PROJECTION))
    narrow, wide = (trainable(replace(section, hidden_dim=hidden)) for hidden in (512, 1024))  # the count is linear
    return round(512 + 512 * (wanted - narrow) / (wide - narrow))
