"""Settings of a training run: one dataclass per section, with torchtitan's section and field names. Imports no torch.

A field's docstring is its help text on the command line and in docs/reference. Invalid values and combinations raise
UserError in `__post_init__`, before data or model are loaded.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from thinpipe.config.boundary import BoundaryConfig, boundary_of_published_model
from thinpipe.config.huggingface_model import LoraConfig
from thinpipe.config.link import LinkConfig
from thinpipe.config.model import ExecutionConfig, ProjectionConfig, SubspaceConfig
from thinpipe.config.model_settings import ModelSettings as ModelSettings
from thinpipe.config.offload import Offload
from thinpipe.config.precision import RECIPES, Precision, Recipe
from thinpipe.config.rounds import RoundsConfig
from thinpipe.config.run_data import DataConfig as DataConfig
from thinpipe.core.errors import UserError


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    dump_folder: Path = Path("runs/default")
    """Output folder of the run: event log, settings, checkpoints."""
    print_config: bool = False
    """Print all settings, defaults included, before training starts."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    steps: int = 1000
    """Optimiser steps of the whole run, including the steps before a resume."""
    global_batch_size: int = 16
    """Sequences per optimiser step."""
    seq_len: int = 128
    """Tokens per sequence. For chats: of a row, and the longest chat must fit."""
    packing: bool | None = None
    """Chats only: true puts several into a row, if the model keeps them apart (see probe). None: one chat in a row."""
    max_norm: float = 1.0
    """Gradient clipping: maximum global gradient norm. inf switches clipping off."""
    precision: Precision = "auto"
    """Precision recipe. fp32: float32 throughout. bf16-mixed: float32 weights and optimiser state, matrix products in
    bfloat16. bf16: bfloat16 weights and gradients, rounded stochastically, and 8-bit optimiser state: 6 bytes a weight
    instead of 16. fp64: float64 throughout. auto: bf16-mixed on a GPU that has units for bfloat16, else fp32."""
    offload: Offload = "none"
    """What is kept in host memory instead of the device's. optimizer: the optimiser's moments, 8 bytes a weight in fp32
    and bf16-mixed, and with bf16-mixed the float32 weights of blocks, of which the device has bfloat16 copies; each
    update copies them to the device and back, in small parts, beside the computation. The numbers are the same. Without
    effect on a CPU and on Apple's GPUs, which use host memory anyway."""
    device: str = "auto"
    """Device to train on: auto, cpu, cuda, cuda:N or mps. auto selects a GPU if there is one."""
    check_memory: bool = True
    """Refuse to start a run that does not fit into the memory of this machine by the cost model of `thinpipe plan`.
    false: start it all the same, since the cost model may be wrong."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "seq_len"):
            if getattr(self, name) < 1:
                raise UserError(f"training.{name} must be at least 1, not {getattr(self, name)}")
        if not self.max_norm > 0:
            raise UserError(f"training.max_norm must be above 0, not {self.max_norm}; inf switches clipping off")


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    pipeline_parallel_degree: int = 1
    """Number of pipeline processes among which the model's segments are divided. Above 1, `thinpipe train` starts the
    processes on this machine, unless `thinpipe train` itself was started by `torchrun`."""
    pipeline_parallel_schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"] = "1F1B"
    """Pipeline schedule: the order of forward and backward passes of micro-batches."""
    pipeline_parallel_microbatch_size: int | None = None
    """Sequences per micro-batch; must divide training.global_batch_size. None: one micro-batch, the whole batch."""
    pipeline_parallel_shares: tuple[int, ...] | None = None
    """Number of segments of each process, for machines of unequal speed: 3 1 1 gives the first process three segments.
    None: as equal as possible."""
    pipeline_parallel_extra_microbatches: int = 0
    """1F1B only: additional micro-batches in flight on every link, to hide the link's latency. Each one costs the
    memory of its activations in every stage before that link."""
    timeout_seconds: float = 300.0
    """Seconds without a message after which a process is considered lost and the run ends. Must exceed the duration
    of the longest step."""

    def __post_init__(self) -> None:
        if self.pipeline_parallel_degree < 1 or not self.timeout_seconds > 0:
            raise UserError(
                "parallelism.pipeline_parallel_degree must be at least 1 and parallelism.timeout_seconds above 0"
            )
        if self.pipeline_parallel_extra_microbatches < 0:
            raise UserError("parallelism.pipeline_parallel_extra_microbatches must be at least 0")
        if self.pipeline_parallel_extra_microbatches and self.pipeline_parallel_schedule != "1F1B":
            raise UserError(
                "parallelism.pipeline_parallel_extra_microbatches is for 1F1B, not "
                f"{self.pipeline_parallel_schedule}: leave it out"
            )
        size = self.pipeline_parallel_microbatch_size
        if size is not None and size < 1:
            raise UserError(f"parallelism.pipeline_parallel_microbatch_size must be at least 1, not {size}")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = 1e-3
    """Peak learning rate of the schedule."""
    beta1: float = 0.9
    """AdamW decay rate of the first moment (mean of the gradients)."""
    beta2: float = 0.95
    """AdamW decay rate of the second moment (mean of the squared gradients)."""
    eps: float = 1e-8
    """AdamW epsilon."""
    weight_decay: float = 0.01
    """AdamW weight decay of matrices; norms and biases are not decayed."""
    second_moment: Literal["row", "element"] = "row"
    """Second moment of parameters that hold subspace coordinates. row: one number per row of the full-width matrix
    (arXiv 2506.01260). element: one number per entry, as in plain AdamW."""
    matrix_lr_factor: float | None = None
    """Factor on lr for all matrices but embedding tables. A rate found at width d0 transfers to width d with the factor
    d0 / d (muP, arXiv 2203.03466). None: 1."""

    def __post_init__(self) -> None:
        if self.matrix_lr_factor is not None and not self.matrix_lr_factor > 0:
            raise UserError(f"optimizer.matrix_lr_factor must be above 0, not {self.matrix_lr_factor}")
        if not (self.lr > 0 and self.eps > 0 and self.weight_decay >= 0):
            raise UserError("optimizer.lr and optimizer.eps must be above 0, optimizer.weight_decay at least 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError("optimizer.beta1 and optimizer.beta2 must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class LRSchedulerConfig:
    warmup_steps: int = 50
    """Steps of linear warm-up from 0 to optimizer.lr."""
    decay_type: Literal["cosine", "linear", "wsd"] = "cosine"
    """Decay after the warm-up. cosine, linear: from the first step after the warm-up to the last step. wsd
    (warmup-stable-decay): constant, then linear decay during the last steps (see decay_ratio)."""
    decay_ratio: float | None = None
    """wsd only: fraction of all steps during which the learning rate decays (default 0.2)."""
    min_lr_factor: float = 0.1
    """Final learning rate, as a fraction of optimizer.lr."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UserError(f"lr_scheduler.warmup_steps must be at least 0, not {self.warmup_steps}")
        if not 0 <= self.min_lr_factor <= 1:
            raise UserError(f"lr_scheduler.min_lr_factor must lie between 0 and 1, not {self.min_lr_factor}")
        if self.decay_ratio is not None and self.decay_type != "wsd":
            raise UserError(
                f'lr_scheduler.decay_ratio is for decay_type = "wsd", not {self.decay_type!r}: leave it out'
            )
        if self.decay_ratio is not None and not 0 < self.decay_ratio <= 1:
            raise UserError(f"lr_scheduler.decay_ratio must lie between 0 and 1, not {self.decay_ratio}")

    def warmup_within(self, steps: int) -> tuple[int, str] | None:
        """A warm-up for a run that was made so short that this one does not fit, with a sentence that says so; None if
        it fits."""
        if not 0 < steps <= self.warmup_steps:
            return None
        fewer = steps // 10
        return fewer, (
            f"{steps} steps are not more than the warm-up of {self.warmup_steps}: lr_scheduler.warmup_steps is {fewer} "
            "in this run"
        )


@dataclass(frozen=True, kw_only=True)
class BasisConfig:
    """Updates of the subspace basis on the Grassmann manifold (subspace models only)."""

    interval: int = 500
    """Optimiser steps between two basis updates; 0: the initial basis is never changed."""
    step_size: float = 1.0
    """Step size of a basis update. The update direction is normalised by the gradients' energy."""

    def __post_init__(self) -> None:
        if self.interval < 0 or not self.step_size > 0:
            raise UserError("basis.interval must be at least 0 and basis.step_size above 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    interval: int | None = None
    """Optimiser steps between two checkpoints; a final checkpoint is written at the end. None: 200 steps; in a run with
    a hub, the shortest interval that all peers' uplinks and the hub's downlink allow (see uplink_share)."""
    keep_latest_k: int = 2
    """Number of newest checkpoints to keep; older ones are deleted. 0: keep all."""
    uplink_share: float = 0.25
    """Run with a hub: fraction of each peer's uplink, and of the hub's downlink, that checkpoint uploads may use while
    training continues."""

    def __post_init__(self) -> None:
        if (self.interval is not None and self.interval < 1) or self.keep_latest_k < 0:
            raise UserError("checkpoint.interval must be at least 1 and checkpoint.keep_latest_k at least 0")
        if not 0 < self.uplink_share <= 1:
            raise UserError(f"checkpoint.uplink_share must be above 0 and at most 1, not {self.uplink_share}")

    @property
    def steps(self) -> int:
        """`interval`, or the default of 200 optimiser steps for a run without a hub."""
        return 200 if self.interval is None else self.interval


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    freq: int = 200
    """Optimiser steps between two validations; a final validation runs at the end. 0: no validation."""
    steps: int = 20
    """Global batches per validation, evenly spaced over the validation text. 0: the whole validation text."""

    def __post_init__(self) -> None:
        if self.freq < 0 or self.steps < 0:
            raise UserError("validation.freq and validation.steps must be at least 0")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    log_freq: int = 10
    """Optimiser steps between two log lines when the output is not a terminal."""
    live: bool = False
    """Show the live terminal view of `thinpipe watch` instead of a progress bar."""
    dashboard: int | None = None
    """Port on which to serve the run's web dashboard, on this machine only; 0: any free port. None: no dashboard."""
    prometheus: int | None = None
    """Port on which to serve Prometheus metrics, on this machine only. None: no metrics endpoint."""
    tensorboard: bool = False
    """Write TensorBoard event files into job.dump_folder."""
    wandb: str | None = None
    """Weights & Biases project to log to. None: no logging to Weights & Biases."""

    def __post_init__(self) -> None:
        if self.log_freq < 1:
            raise UserError(f"metrics.log_freq must be at least 1, not {self.log_freq}")
        for name in ("dashboard", "prometheus"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise UserError(f"metrics.{name} is a port between 0 and 65535, not {port}")


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    seed: int = 0
    """Random seed of initial weights, data order and dropout."""
    deterministic: bool = False
    """Allow only deterministic PyTorch operations; other operations raise an error. Runs on a CPU are deterministic
    without this setting, for a fixed number of threads."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Train a model, or resume a stopped run: thinpipe train RUN.toml [--section.field value].

    The file overrides the defaults below, and a flag overrides the file.
    """

    job: JobConfig = field(default_factory=JobConfig)
    model: ModelSettings = field(default_factory=ModelSettings)
    lora: Annotated[LoraConfig | None, tyro.conf.AvoidSubcommands] = None
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    basis: BasisConfig = field(default_factory=BasisConfig)
    boundary: BoundaryConfig = field(default_factory=BoundaryConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    link: LinkConfig = field(default_factory=LinkConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    def __post_init__(self) -> None:
        if self.model.hf is not None and self.model.boundaries:
            object.__setattr__(self, "boundary", boundary_of_published_model(self.boundary))
        if self.training.global_batch_size % self.microbatch_size:
            raise UserError(
                f"parallelism.pipeline_parallel_microbatch_size {self.microbatch_size} does not divide "
                f"training.global_batch_size {self.training.global_batch_size}: micro-batches must be equal"
            )
        if self.parallelism.pipeline_parallel_schedule == "ZBVZeroBubble":
            self._refuse_unsplit_backward()
        self._refuse_few_microbatches()
        self._refuse_adapters_of_nothing()
        self._refuse_rounds()
        if self.link.is_shaped and self.parallelism.pipeline_parallel_degree == 1:
            raise UserError(
                "[link] emulates the links between processes, and there is one process: "
                "set parallelism.pipeline_parallel_degree, or leave [link] out"
            )
        if self.lr_scheduler.warmup_steps >= self.training.steps:
            raise UserError(
                f"lr_scheduler.warmup_steps {self.lr_scheduler.warmup_steps} must be below "
                f"training.steps {self.training.steps}"
            )

    def _refuse_unsplit_backward(self) -> None:
        if self.execution.compile:
            raise UserError(
                "ZBVZeroBubble splits the backward pass, which compiled blocks cannot: set execution.compile = false"
            )
        if self.planned_recipe.weights == "bfloat16":
            raise UserError(
                "ZBVZeroBubble splits the backward pass, and torch adds up the gradients of split ones by itself, "
                'without the stochastic rounding of training.precision = "bf16": set '
                "parallelism.pipeline_parallel_schedule to 1F1B, GPipe or Interleaved1F1B"
            )
        if self.model.projection.width is not None:
            raise UserError(
                "ZBVZeroBubble splits the backward pass, and torch 2.13 cannot split that of a boundary projection's "
                "tables: set parallelism.pipeline_parallel_schedule to 1F1B, GPipe or Interleaved1F1B"
            )

    def _refuse_adapters_of_nothing(self) -> None:
        if self.lora is not None and self.model.hf is None:
            raise UserError("[lora] adapts a Hugging Face model: set model.hf, or leave [lora] out")
        if self.lora is None and self.model.quantize_base is not None:
            raise UserError(
                "model.quantize_base freezes the base, so there is nothing to train without adapters: write a section "
                "[lora], or leave model.quantize_base out"
            )

    def _refuse_rounds(self) -> None:
        if not self.rounds.steps:
            return
        refuse_unmergeable(self.model.subspace, self.model.projection, self.basis)
        if self.lora is None and self.planned_recipe.weights != "float32":
            raise UserError(
                f'replicas merge their weights in float32, and training.precision = "{self.training.precision}" keeps '
                'others: set it to "fp32" or "bf16-mixed", or leave [rounds] out'
            )
        if any(link.feedback != "none" for link in (self.boundary.states, self.boundary.gradients)):
            raise UserError(
                "codecs that remember earlier steps do not know what a merge changes: set "
                'boundary.states.feedback and boundary.gradients.feedback to "none", or leave [rounds] out'
            )

    def _refuse_few_microbatches(self) -> None:
        schedule, degree = self.parallelism.pipeline_parallel_schedule, self.parallelism.pipeline_parallel_degree
        if degree == 1 or schedule == "GPipe":
            return
        stages = degree if schedule == "1F1B" else 2 * degree
        if self.microbatches < stages:
            raise UserError(
                f"{schedule} on {degree} processes needs {stages} micro-batches or more, and there are "
                f"{self.microbatches}: set parallelism.pipeline_parallel_microbatch_size to at most "
                f"{self.training.global_batch_size // stages}, or raise training.global_batch_size"
                if self.training.global_batch_size >= stages
                else f"{schedule} on {degree} processes needs {stages} micro-batches or more: raise "
                f"training.global_batch_size to at least {stages}"
            )
        rounds = max(1, self.microbatches // degree)
        if schedule == "Interleaved1F1B" and self.microbatches % rounds:
            raise UserError(
                f"Interleaved1F1B on {degree} processes cannot share {self.microbatches} micro-batches equally: "
                f"make them a multiple of {degree}"
            )

    @property
    def microbatch_size(self) -> int:
        return self.parallelism.pipeline_parallel_microbatch_size or self.training.global_batch_size

    @property
    def planned_recipe(self) -> Recipe:
        """Recipe by which sizes are counted where the device is not known: auto counts as fp32."""
        return RECIPES["fp32" if self.training.precision == "auto" else self.training.precision]

    @property
    def microbatches(self) -> int:
        return self.training.global_batch_size // self.microbatch_size


def refuse_unmergeable(subspace: SubspaceConfig, projection: ProjectionConfig, basis: BasisConfig) -> None:
    """Raises UserError if replicas of such a model cannot be merged."""
    if subspace.width is not None and basis.interval:
        raise UserError("a basis cannot move while replicas train apart: set basis.interval = 0, or leave [rounds] out")
    if projection.width is not None and projection.kind == "learned":
        raise UserError(
            "the mean of orthonormal matrices is not orthonormal, so replicas with learned projections cannot be "
            'merged: set model.projection.kind to "keel" or "bottleneck", or leave [rounds] out'
        )
