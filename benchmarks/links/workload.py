"""What `python -m benchmarks.links` times: a model cut into stages, what crosses the cuts, and the link between
processes.

Plain numbers that travel to the processes as JSON and come out as the settings of an ordinary training run. No torch.
"""

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from thinpipe.config.boundary import BoundaryConfig, FormatName
from thinpipe.config.link import LinkConfig
from thinpipe.config.model import ExecutionConfig, SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    LRSchedulerConfig,
    ModelSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
)

ScheduleName = Literal["GPipe", "1F1B"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model and one batch; every process has one stage, and every stage as many blocks."""

    stages: int
    """Processes, each with one stage."""
    blocks_per_stage: int
    """Blocks of each stage."""
    dim: int
    """Width d of the model."""
    heads: int
    """Attention heads; they share dim."""
    kv_heads: int
    """Heads of keys and values."""
    hidden_dim: int
    """Width of the MLP."""
    vocab: int
    """Rows of the embedding and of the head."""
    seq_len: int
    """Tokens per sequence."""
    sequences: int
    """Sequences per micro-batch."""
    microbatches: int
    """Micro-batches per step."""
    bf16: bool = False
    """Weights, states and products in bfloat16; else float32."""
    compiled: bool = False
    """Blocks go through torch.compile."""
    free_last: bool = True
    """In a subspace model, blocks of the last stage write to all of d."""

    @property
    def step_tokens(self) -> int:
        return self.seq_len * self.sequences * self.microbatches

    @property
    def text(self) -> str:
        blocks = f"{self.stages} stages x {self.blocks_per_stage} block{'s' if self.blocks_per_stage > 1 else ''}"
        kind = ("bf16" if self.bf16 else "fp32") + (", compiled" if self.compiled else "")
        return (
            f"{blocks}, d={self.dim}, {self.heads} heads ({self.kv_heads} for keys), MLP {self.hidden_dim}, "
            f"vocabulary {self.vocab}, {self.microbatches} micro-batches of {self.sequences} x {self.seq_len} tokens, "
            f"{kind}"
        )


@dataclass(frozen=True, kw_only=True)
class RunLink:
    """Emulated link of every process; by default none is emulated."""

    mbps: float | None = None
    """Rate up and down; None: unlimited."""
    round_trip_ms: float = 0.0

    @property
    def config(self) -> LinkConfig:
        rate = None if self.mbps is None else f"{self.mbps:g}mbps"
        return LinkConfig(up=rate, down=rate, latency=f"{self.round_trip_ms / 2:g}ms")

    @property
    def text(self) -> str:
        rate = "full speed" if self.mbps is None else f"{self.mbps:g} Mbps"
        return rate if not self.round_trip_ms else f"{rate}, {self.round_trip_ms:g} ms"


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A training run that can be asked for steps. `bare` is torch's own engine with nothing of ours around it."""

    shape: Shape
    width: int | None = None
    """k; None is a dense model."""
    number_format: FormatName = "fp32"
    """Of messages, in both directions."""
    schedule: ScheduleName = "1F1B"
    extra: int = 0
    """Micro-batches in flight beside those that 1F1B has by itself."""
    link: RunLink = msgspec.field(name="line", default=RunLink())
    bare: bool = False

    @property
    def method(self) -> str:
        return f"dense {self.number_format}" if self.width is None else f"k={self.width} {self.number_format}"

    @property
    def _subspace(self) -> SubspaceConfig:
        if self.width is None:
            return SubspaceConfig()
        return SubspaceConfig(width=self.width, free_last=self.shape.free_last)

    @property
    def schedule_text(self) -> str:
        return f"{self.schedule} + {self.extra}" if self.extra else self.schedule

    @property
    def config(self) -> RunConfig:
        shape = self.shape
        return RunConfig(
            model=ModelSettings(
                preset="llama-tiny",
                dim=shape.dim,
                n_layers=shape.stages * shape.blocks_per_stage,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                hidden_dim=shape.hidden_dim,
                max_seq_len=shape.seq_len,
                boundaries=tuple(stage * shape.blocks_per_stage for stage in range(1, shape.stages)),
                subspace=self._subspace,
            ),
            training=TrainingConfig(
                global_batch_size=shape.sequences * shape.microbatches,
                seq_len=shape.seq_len,
                max_norm=math.inf,
                precision="bf16" if shape.bf16 else "fp32",
                device="cpu",
            ),
            parallelism=ParallelismConfig(
                pipeline_parallel_degree=shape.stages,
                pipeline_parallel_schedule=self.schedule,
                pipeline_parallel_microbatch_size=shape.sequences,
                pipeline_parallel_extra_microbatches=self.extra,
            ),
            boundary=BoundaryConfig(forward=self.number_format, backward=self.number_format),
            link=self.link.config,
            execution=ExecutionConfig(compile=shape.compiled),
            lr_scheduler=LRSchedulerConfig(warmup_steps=1),
            basis=BasisConfig(interval=0),
        )
