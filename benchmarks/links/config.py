"""Settings of `python -m benchmarks.links`. No torch here, so that `--help` can show them at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from benchmarks.links.workload import ScheduleName, Shape
from benchmarks.step.config import MIN_PAIRS
from thinpipe.config.boundary import FormatName
from thinpipe.core.errors import UserError

PartName = Literal["engine", "sweep", "ratio", "schedules"]

ENGINE_SHAPE = Shape(
    stages=2,
    blocks_per_stage=2,
    dim=384,
    heads=6,
    kv_heads=6,
    hidden_dim=1024,
    vocab=1024,
    seq_len=128,
    sequences=4,
    microbatches=8,
)
SWEEP_SHAPE = Shape(
    stages=3,
    blocks_per_stage=1,
    dim=320,
    heads=5,
    kv_heads=1,
    hidden_dim=640,
    vocab=512,
    seq_len=64,
    sequences=4,
    microbatches=64,
)
LIGHT_SHAPE = Shape(
    stages=3,
    blocks_per_stage=1,
    dim=256,
    heads=1,
    kv_heads=1,
    hidden_dim=8,
    vocab=256,
    seq_len=64,
    sequences=32,
    microbatches=32,
    bf16=True,
    compiled=True,
    free_last=False,
)
HEAVY_SHAPE = Shape(
    stages=3,
    blocks_per_stage=2,
    dim=512,
    heads=8,
    kv_heads=8,
    hidden_dim=1536,
    vocab=1024,
    seq_len=128,
    sequences=2,
    microbatches=16,
)


@dataclass(frozen=True, kw_only=True)
class EnginePart:
    """Against torch's pipelining as it comes, at full speed, with float32 messages."""

    shape: Shape = ENGINE_SHAPE
    """The model and its batch."""
    schedules: tuple[ScheduleName, ...] = ("1F1B", "GPipe")
    """Each is compared by itself."""
    pairs: int = 20
    """Pairs of steps, ours and the bare engine's in turn."""


@dataclass(frozen=True, kw_only=True)
class SweepPart:
    """Tokens per second over the rate of the link, for messages of every kind."""

    shape: Shape = SWEEP_SHAPE
    """The model and its batch. Three stages are the fewest with one in the middle, whose uplink carries states and
    gradients."""
    mbps: tuple[float, ...] = (10, 20, 50, 80, 200, 1000)
    """Rates of the link of every process, up and down."""
    round_trips_ms: tuple[float, ...] = (0, 40)
    """Round trips between two processes."""
    compressions: tuple[int, ...] = (8, 32, 100)
    """Subspace widths as divisors of dim: 100 stands for k = d/100."""
    extra: int = 4
    """Micro-batches in flight beside those that 1F1B has by itself."""
    steps: int = 3
    """Timed steps per point, after one that is not; a third less on links so slow that a step takes long."""


@dataclass(frozen=True, kw_only=True)
class RatioPart:
    """How many times faster compressed messages are than uncompressed bfloat16 ones, on one link."""

    shape: Shape = LIGHT_SHAPE
    """As much to send for as little to compute as a Llama allows: the link decides."""
    heavy: Shape = HEAVY_SHAPE
    """A model of ordinary proportions beside it: the processor decides."""
    mbps: float = 80.0
    """Rate of the link of every process, up and down."""
    compression: int = 100
    """Subspace width as a divisor of dim."""
    number_format: FormatName = "int8"
    """Of compressed messages."""
    extra: int = 2
    """Micro-batches in flight beside those that 1F1B has by itself."""
    pairs: int = 20
    """Pairs of steps, compressed and uncompressed in turn."""
    heavy_pairs: int = 6
    """The same for the compute-heavy setting."""


@dataclass(frozen=True, kw_only=True)
class SchedulesPart:
    """GPipe against 1F1B on a link with latency: tokens per second, and the memory that each needs."""

    shape: Shape = SWEEP_SHAPE
    """The model and its batch."""
    mbps: float = 80.0
    """Rate of the link of every process, up and down."""
    round_trip_ms: float = 40.0
    """Round trip between two processes."""
    compressions: tuple[int, ...] = (100,)
    """Subspace widths as divisors of dim, beside the dense model."""
    schedules: tuple[ScheduleName, ...] = ("GPipe", "1F1B")
    """Those compared."""
    extra: int = 4
    """1F1B also with this many additional micro-batches in flight; 0: without."""
    steps: int = 5
    """Timed steps per point, after one that is not."""


@dataclass(frozen=True, kw_only=True)
class LinksConfig:
    """Speed of a pipeline over slow links: local processes, each behind an emulated home link.

    Every finished point is kept in the output folder at once: run the same command again to go on after a break.
    """

    output: Path = Path("bench_links")
    """Folder for points.jsonl (raw, appended), links.json (everything), links.md and the figures."""
    parts: tuple[PartName, ...] = ("engine", "sweep", "ratio", "schedules")
    """What to measure."""
    threads: int = 1
    """Of every process."""
    engine: EnginePart = field(default_factory=EnginePart)
    sweep: SweepPart = field(default_factory=SweepPart)
    ratio: RatioPart = field(default_factory=RatioPart)
    schedules: SchedulesPart = field(default_factory=SchedulesPart)

    def __post_init__(self) -> None:
        for name, pairs in (
            ("engine.pairs", self.engine.pairs),
            ("ratio.pairs", self.ratio.pairs),
            ("ratio.heavy-pairs", self.ratio.heavy_pairs),
        ):
            if pairs < MIN_PAIRS or pairs % 2:
                raise UserError(f"--{name} must be even and at least {MIN_PAIRS}, not {pairs}")
        for name, steps in (("sweep", self.sweep.steps), ("schedules", self.schedules.steps)):
            if steps < 1:
                raise UserError(f"--{name}.steps must be at least 1, not {steps}")
        if not self.parts or len(set(self.parts)) < len(self.parts):
            raise UserError("--parts must name one or more parts, each once")
        if min(self.sweep.mbps, default=0) <= 0 or min(self.sweep.round_trips_ms, default=-1) < 0:
            raise UserError("--sweep.mbps must be above 0 and --sweep.round-trips-ms at least 0, one or more of each")
        for name, shape, compression in (
            ("sweep", self.sweep.shape, max(self.sweep.compressions, default=1)),
            ("ratio", self.ratio.shape, self.ratio.compression),
            ("ratio", self.ratio.heavy, self.ratio.compression),
            ("schedules", self.schedules.shape, max(self.schedules.compressions, default=1)),
        ):
            if not 1 <= compression <= shape.dim:
                raise UserError(f"--{name}: d/{compression} of d={shape.dim} is no width: compress less, or more width")
        if self.threads < 1:
            raise UserError(f"--threads must be at least 1, not {self.threads}")
