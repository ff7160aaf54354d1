"""The cases of the contract test, and what a case comes to: shared by the twin in the test and the worker processes."""

import hashlib
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from tests.reference.language import SyntheticLanguage
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import METHODS
from thinpipe.boundary.settings import BoundarySection, Compression
from thinpipe.checkpoint import memories
from thinpipe.models.config import NeckConfig, SubspaceConfig
from thinpipe.pipeline.placement import LAYOUTS
from thinpipe.train.config import (
    BasisSection,
    ModelSection,
    ParallelismSection,
    RunConfig,
    SchedulerSection,
    TrainingSection,
)
from thinpipe.train.engine import Engine

TOKENS, VOCABULARY = 12, 64


@dataclass(frozen=True)
class Case:
    """Settings of the boundaries of one model; GPT-2 has dropout, which must not differ either."""

    name: str
    boundary: BoundarySection
    family: str = "llama"
    neck: NeckConfig = field(default_factory=NeckConfig)

    @property
    def confined(self) -> bool:
        return self.boundary.method == "subspace"

    @property
    def steps(self) -> int:
        """Exact methods are followed for longer: they alone can be wrong in the last bit only."""
        return 20 if self.boundary == BoundarySection(method=self.boundary.method) else 6

    @property
    def basis_interval(self) -> int:
        """Two changes of basis."""
        return 8 if self.steps == 20 else 3


def formatted(method: str, forward: str, backward: str, family: str = "llama") -> Case:
    boundary = BoundarySection(method=method, forward=forward, backward=backward)
    return Case(f"{family}-{method}-{forward}-{backward}", boundary, family)


def compressed(name: str, method: str, states: Compression, gradients: Compression, **settings: bool) -> Case:
    return Case(name, BoundarySection(method=method, states=states, gradients=gradients, **settings))


TOPK = Compression(kind="topk", keep=0.3)
QUANTISE = Compression(kind="quantise", bits=4, tile=16)
KEEL = NeckConfig(width=6, anchor_rank=4, anchor_reach=3, first_rank=5, ngram_rows=32, ngram_rank=4)
CASES = [
    *(formatted(method, number_format, number_format) for method in METHODS for number_format in FORMATS),
    formatted("subspace", "int8", "int4"),
    formatted("subspace", "fp32", "int8", family="gpt2"),
    compressed("topk", "none", replace(TOPK, keep=0.1), replace(TOPK, per="token", format="int8")),
    compressed("topk-mask", "none", TOPK, Compression(kind="topk", reuse_mask=True)),
    compressed("topk-whole-inference", "subspace", TOPK, Compression(), at_inference=False),
    compressed("quantise", "none", Compression(kind="quantise", bits=3), replace(QUANTISE, rotate=True)),
    compressed("lowrank", "none", Compression(kind="lowrank", rank=4), Compression(kind="lowrank", rank=4)),
    compressed("ef", "subspace", replace(TOPK, memory="ef"), replace(QUANTISE, memory="ef")),
    compressed("ef21", "none", replace(QUANTISE, memory="ef21"), replace(TOPK, memory="ef21")),
    compressed(
        "ef21-mask", "none", replace(TOPK, memory="ef21"), Compression(kind="topk", reuse_mask=True, memory="ef")
    ),
    compressed("aqsgd", "none", replace(QUANTISE, bits=2, memory="aqsgd"), QUANTISE),
    Case("keel", BoundarySection(), neck=KEEL),
    Case("keel-int4", BoundarySection(forward="int4", backward="int4"), neck=KEEL),
    Case("learned", BoundarySection(), neck=NeckConfig(kind="learned", width=6, anchor_rank=4)),
    Case("bottleneck", BoundarySection(forward="bf16", backward="bf16"), neck=NeckConfig(kind="bottleneck", width=6)),
]


FEW = ("llama-subspace-fp32-fp32", "aqsgd", "keel-int4")
"""A basis that changes, a memory of samples, a neck: what a schedule could get wrong."""


def cases_for(schedule: str, *, few: bool = False) -> list[Case]:
    """A backward pass that is split is not for necks."""
    named = [case for case in CASES if not few or case.name in FEW]
    return [case for case in named if schedule != "ZBVZeroBubble" or case.neck.width is None]


def batch_size(segments: int) -> int:
    """As many micro-batches of one sample as the deepest schedules need."""
    return max(4, segments)


def config_of(case: Case, segments: int, schedule: str) -> RunConfig:
    sizes = {"n_kv_heads": 1, "hidden_dim": 48} if case.family == "llama" else {"dropout": 0.1}
    return RunConfig(
        model=ModelSection(
            preset=f"{case.family}-tiny",
            dim=32,
            n_layers=segments,
            n_heads=2,
            max_seq_len=TOKENS,
            boundaries=tuple(range(1, segments)),
            subspace=SubspaceConfig(width=6) if case.confined else SubspaceConfig(),
            neck=case.neck,
            **sizes,
        ),
        training=TrainingSection(steps=case.steps, global_batch_size=batch_size(segments), seq_len=TOKENS),
        parallelism=ParallelismSection(pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule=schedule),
        boundary=case.boundary,
        lr_scheduler=SchedulerSection(warmup_steps=1),
        basis=BasisSection(interval=case.basis_interval),
    )


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def run_case(case: Case, segments: int, schedule: str, group: dist.ProcessGroup | None = None) -> dict:
    """Steps and changes of basis: losses and norms, then hashes of gradients, weights, moments, basis, memories.

    Every third batch comes again, so that a method that remembers samples meets them twice.
    """
    config = config_of(case, segments, schedule)
    engine = Engine(config, config.model.resolve(VOCABULARY), group)
    language, batch = SyntheticLanguage(VOCABULARY, seed=1), batch_size(segments)
    seen, gradients = [], {}
    for step in range(case.steps):
        outcome = engine.step(step, language.batch(step % 3, batch, TOKENS).numpy(), lr=3e-3)
        assert outcome.fault is None
        seen.append([outcome.loss, outcome.grad_norm])
        gradients = {name: digest(p.grad) for name, p in engine.parameters.items()}
        if engine.basis_is_due(step + 1):
            engine.update_basis(language.batch(1000 + step, batch, TOKENS).numpy())
    validation, _ = engine.evaluate([language.batch(2000, batch, TOKENS).numpy()])
    moments = {
        name: [digest(engine.optimizer.state[p][key]) for key in ("exp_avg", "exp_avg_sq")]
        for name, p in engine.parameters.items()
    }
    return {
        "seen": seen,
        "validation": validation,
        "gradients": gradients,
        "weights": {name: digest(p) for name, p in engine.parameters.items()},
        "moments": moments,
        "basis": getattr(engine.model.space, "version", None),
        "memories": {
            f"{layer}/{name}": digest(tensor)
            for layer, state in memories(engine.methods, engine.mine).items()
            for name, tensor in state.items()
        },
        "stated": [
            [method.forward_nbytes, method.backward_nbytes, method.at_inference.forward_nbytes]
            for method in engine.methods
        ],
    }


def segments_for(schedule: str, processes: int) -> int:
    return processes * LAYOUTS[schedule].stages_per_process
