"""All settings of a run, section by section, with the names that users of torchtitan know. No torch here.

Each field's docstring is its help on the command line. What cannot work is refused here, before anything is loaded.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from thinpipe.boundary.settings import BoundarySection
from thinpipe.core.errors import UserError
from thinpipe.models.config import Execution, ModelConfig, NeckConfig, SubspaceConfig
from thinpipe.models.presets import PRESETS
from thinpipe.transport.settings import LinkSection


@dataclass(frozen=True, kw_only=True)
class JobSection:
    dump_folder: Path = Path("runs/default")
    """Everything the run writes goes here: events, settings, checkpoints."""
    print_config: bool = False
    """Print all settings, defaults included, before the run begins."""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """A preset, and the fields in which the model differs from it."""

    preset: str = "llama-tiny"
    """One of the named sizes, for example llama-tiny, llama-150m, llama-8b, gpt2."""
    initial: Path | None = None
    """Start from this checkpoint folder (see `thinpipe import`) instead of random weights; it also says the model."""
    dim: int | None = None
    """Width d of the model. None, here and below: as the preset has it."""
    n_layers: int | None = None
    """Blocks."""
    n_heads: int | None = None
    """Attention heads, which share dim."""
    n_kv_heads: int | None = None
    """Llama only: heads of keys and values."""
    hidden_dim: int | None = None
    """Llama only: width of the MLP."""
    max_seq_len: int | None = None
    """The longest text that the model can be given, in tokens."""
    dropout: float | None = None
    """GPT-2 only."""
    tied: bool | None = None
    """Head and embedding share their weights: uncut dense models only."""
    boundaries: tuple[int, ...] | None = None
    """Cuts between blocks: 2 4 makes three segments."""
    subspace: SubspaceConfig = field(default_factory=SubspaceConfig)
    neck: NeckConfig = field(default_factory=NeckConfig)

    def __post_init__(self) -> None:
        if self.initial is not None:
            untouched = ModelSection()
            for setting in dataclasses.fields(self):
                if setting.name != "initial" and getattr(self, setting.name) != getattr(untouched, setting.name):
                    raise UserError(f"model.initial says the whole model: leave model.{setting.name} out")

    def resolve(self, vocab_size: int) -> ModelConfig:
        """The model's own configuration; the data says how many tokens there are."""
        if self.preset not in PRESETS:
            raise UserError(f"model.preset {self.preset!r} is not one of: {', '.join(PRESETS)}")
        if self.subspace.fixed == "given":
            raise UserError(
                'model.subspace.fixed = "given" comes with `thinpipe import` only: write "signs" or "gaussian"'
            )
        if self.subspace.width is None and self.subspace != SubspaceConfig():
            raise UserError("model.subspace has settings but no width: set model.subspace.width, or leave them out")
        preset = PRESETS[self.preset]
        changes: dict[str, object] = {"vocab_size": vocab_size, "subspace": self.subspace, "neck": self.neck}
        known = {field.name for field in dataclasses.fields(preset)}
        for change in dataclasses.fields(self):
            value = getattr(self, change.name)
            if value is None or change.name in ("preset", "initial", "subspace", "neck"):
                continue
            if change.name not in known:
                raise UserError(f"model.{change.name} does not belong to {self.preset}: leave it out")
            changes[change.name] = value
        return dataclasses.replace(preset, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class DataSection:
    path: Path = Path("data/tokens")
    """Folder made by `thinpipe tokenize`."""


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    steps: int = 1000
    """Optimiser steps of the whole run, those before a resume included."""
    global_batch_size: int = 16
    """Sequences per optimiser step."""
    seq_len: int = 128
    """Tokens per sequence."""
    max_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of weights and optimiser state."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N. auto takes a GPU when there is one."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "seq_len"):
            if getattr(self, name) < 1:
                raise UserError(f"training.{name} must be at least 1, not {getattr(self, name)}")
        if not self.max_norm > 0:
            raise UserError(f"training.max_norm must be above 0, not {self.max_norm}; inf switches clipping off")


@dataclass(frozen=True, kw_only=True)
class ParallelismSection:
    pipeline_parallel_degree: int = 1
    """Processes that share the model's segments. Above 1, `thinpipe train` starts them on this machine, unless
    `torchrun` has started it."""
    pipeline_parallel_schedule: Literal["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"] = "1F1B"
    """The order of work when segments run in several processes."""
    pipeline_parallel_microbatch_size: int | None = None
    """Sequences per micro-batch. None: the whole batch at once. Must divide training.global_batch_size."""
    pipeline_parallel_shares: tuple[int, ...] | None = None
    """Segments of each stage, for machines that are not equal: 3 1 1 gives the first process three. None: as equal as
    they come."""
    pipeline_parallel_extra_microbatches: int = 0
    """1F1B only: micro-batches under way on every link beside those it has by itself. A link with latency needs some;
    each costs the memory of its activations in every stage before that link."""
    timeout_seconds: float = 300.0
    """A process that says nothing for so long is taken for lost, and the run ends. Must exceed the longest step."""

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
class OptimizerSection:
    lr: float = 1e-3
    """The highest learning rate of the schedule."""
    beta1: float = 0.9
    """AdamW: how long the mean of the gradients remembers."""
    beta2: float = 0.95
    """AdamW: how long the mean of their squares does."""
    eps: float = 1e-8
    """AdamW: added to the root of that."""
    weight_decay: float = 0.01
    """Of matrices; norms and biases are not decayed."""
    second_moment: Literal["row", "element"] = "row"
    """For coordinates in a subspace: the paper's row-wise rule, or plain AdamW."""

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.eps > 0 and self.weight_decay >= 0):
            raise UserError("optimizer.lr and optimizer.eps must be above 0, optimizer.weight_decay at least 0")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise UserError("optimizer.beta1 and optimizer.beta2 must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class SchedulerSection:
    warmup_steps: int = 50
    """Linear rise from 0."""
    decay_type: Literal["cosine", "linear", "wsd"] = "cosine"
    """After the warm-up: cosine or linear down to min_lr_factor, or stay and decay at the end (wsd)."""
    decay_ratio: float | None = None
    """wsd only: the share of all steps in which the rate falls linearly (default 0.2)."""
    min_lr_factor: float = 0.1
    """The last learning rate, as a share of optimizer.lr."""

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


@dataclass(frozen=True, kw_only=True)
class BasisSection:
    """How the subspace moves (subspace models only)."""

    interval: int = 500
    """Optimiser steps between two Grassmann updates; 0 keeps the first basis."""
    step_size: float = 1.0
    """Of the step on the manifold, which is normalised by the gradients' energy."""

    def __post_init__(self) -> None:
        if self.interval < 0 or not self.step_size > 0:
            raise UserError("basis.interval must be at least 0 and basis.step_size above 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    interval: int | None = None
    """Optimiser steps between two checkpoints; one more is written at the end. None: 200; in a run with a hub, as few
    as the lines of all allow (see line_share)."""
    keep_latest_k: int = 2
    """Older ones are removed; 0 keeps all."""
    line_share: float = 0.25
    """Of everybody's line to the hub, and of the hub's own, for sending checkpoints while training goes on."""

    def __post_init__(self) -> None:
        if (self.interval is not None and self.interval < 1) or self.keep_latest_k < 0:
            raise UserError("checkpoint.interval must be at least 1 and checkpoint.keep_latest_k at least 0")
        if not 0 < self.line_share <= 1:
            raise UserError(f"checkpoint.line_share must be above 0 and at most 1, not {self.line_share}")

    @property
    def steps(self) -> int:
        """The interval, where nobody has chosen one."""
        return 200 if self.interval is None else self.interval


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    freq: int = 200
    """Optimiser steps between two validations, and one at the end; 0: never."""
    steps: int = 20
    """Global batches per validation, spread evenly over the validation text; 0: all of it."""

    def __post_init__(self) -> None:
        if self.freq < 0 or self.steps < 0:
            raise UserError("validation.freq and validation.steps must be at least 0")


@dataclass(frozen=True, kw_only=True)
class MetricsSection:
    log_freq: int = 10
    """Optimiser steps between two lines on a console that is no terminal."""
    live: bool = False
    """Show the whole pipeline in the terminal, as `thinpipe watch` does, instead of a bar."""
    dashboard: int | None = None
    """Serve a web page of the run on this port of this machine; 0 takes any that is free."""
    prometheus: int | None = None
    """Serve figures for Prometheus on this port of this machine."""
    tensorboard: bool = False
    """Write files for TensorBoard into the run's folder."""
    wandb: str | None = None
    """Log to this project of Weights & Biases."""

    def __post_init__(self) -> None:
        if self.log_freq < 1:
            raise UserError(f"metrics.log_freq must be at least 1, not {self.log_freq}")
        for name in ("dashboard", "prometheus"):
            port = getattr(self, name)
            if port is not None and not 0 <= port < 65536:
                raise UserError(f"metrics.{name} is a port between 0 and 65535, not {port}")


@dataclass(frozen=True, kw_only=True)
class DebugSection:
    seed: int = 0
    """Of initial weights, data order and dropout."""
    deterministic: bool = False
    """Refuse operations that do not repeat bit for bit. CPU runs repeat without it, for a fixed number of threads."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Train a model, or go on where it stopped: thinpipe train RUN.toml [--section.field value].

    The file says what differs from the defaults below; a flag beats the file.
    """

    job: JobSection = field(default_factory=JobSection)
    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lr_scheduler: SchedulerSection = field(default_factory=SchedulerSection)
    basis: BasisSection = field(default_factory=BasisSection)
    boundary: BoundarySection = field(default_factory=BoundarySection)
    link: LinkSection = field(default_factory=LinkSection)
    execution: Execution = field(default_factory=Execution)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    debug: DebugSection = field(default_factory=DebugSection)

    def __post_init__(self) -> None:
        if self.training.global_batch_size % self.microbatch_size:
            raise UserError(
                f"parallelism.pipeline_parallel_microbatch_size {self.microbatch_size} does not divide "
                f"training.global_batch_size {self.training.global_batch_size}: micro-batches must be equal"
            )
        if self.parallelism.pipeline_parallel_schedule == "ZBVZeroBubble":
            self._refuse_unsplit_backward()
        self._refuse_few_microbatches()
        if self.link.is_shaped and self.parallelism.pipeline_parallel_degree == 1:
            raise UserError(
                "link.* is the line between processes, and there is one process: "
                "set parallelism.pipeline_parallel_degree, or leave it out"
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
        if self.model.neck.width is not None:
            raise UserError(
                "ZBVZeroBubble splits the backward pass, and torch 2.13 cannot split that of the tables of a neck: set "
                "parallelism.pipeline_parallel_schedule to 1F1B, GPipe or Interleaved1F1B"
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
    def microbatches(self) -> int:
        return self.training.global_batch_size // self.microbatch_size
