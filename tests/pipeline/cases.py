"""The cases of the contract test, and what a case comes to: shared by the twin in the test and the worker processes."""

import hashlib
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from tests.data.chats import flagged
from tests.reference.language import SyntheticLanguage
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import FORMAT_COMPRESSORS
from thinpipe.checkpoint import codec_states
from thinpipe.config import model_family
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    LRSchedulerConfig,
    ModelSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
)
from thinpipe.pipeline.placement import SCHEDULE_LAYOUTS
from thinpipe.training.engine import Engine

TOKENS, VOCABULARY = 12, 64


@dataclass(frozen=True)
class Case:
    """Settings of the boundaries of one model; GPT-2 has dropout, which must not differ either."""

    name: str
    boundary: BoundaryConfig
    family: str = "llama"
    projection: ProjectionConfig = field(default_factory=ProjectionConfig)
    max_logits: int = model_family.MAX_LOGITS
    chats: bool = False
    """Tokens have flags, and not all are trained on."""

    @property
    def in_subspace(self) -> bool:
        return self.boundary.method == "subspace"

    @property
    def steps(self) -> int:
        """Exact methods are followed for longer: they alone can be wrong in the last bit only."""
        return 20 if self.boundary == BoundaryConfig(method=self.boundary.method) else 6

    @property
    def basis_interval(self) -> int:
        """Two changes of basis."""
        return 8 if self.steps == 20 else 3


def formatted(method: str, forward: str, backward: str, family: str = "llama") -> Case:
    boundary = BoundaryConfig(method=method, forward=forward, backward=backward)
    return Case(f"{family}-{method}-{forward}-{backward}", boundary, family)


def compressed(
    name: str, method: str, states: CompressionConfig, gradients: CompressionConfig, **settings: bool
) -> Case:
    return Case(name, BoundaryConfig(method=method, states=states, gradients=gradients, **settings))


TOPK = CompressionConfig(kind="topk", keep=0.3)
QUANTISE = CompressionConfig(kind="quantise", bits=4, tile=16)
KEEL = ProjectionConfig(
    width=6, token_prior_rank=4, token_prior_window=3, embedding_rank=5, bigram_rows=32, bigram_rank=4
)
CASES = [
    *(formatted(method, number_format, number_format) for method in FORMAT_COMPRESSORS for number_format in FORMATS),
    formatted("subspace", "int8", "int4"),
    formatted("subspace", "fp32", "int8", family="gpt2"),
    compressed("topk", "none", replace(TOPK, keep=0.1), replace(TOPK, per="token", format="int8")),
    compressed("topk-mask", "none", TOPK, CompressionConfig(kind="topk", reuse_mask=True)),
    compressed("topk-whole-inference", "subspace", TOPK, CompressionConfig(), at_inference=False),
    compressed("quantise", "none", CompressionConfig(kind="quantise", bits=3), replace(QUANTISE, rotate=True)),
    compressed(
        "quantise-outliers",
        "none",
        replace(QUANTISE, rotate=True, whole_channels=3, whole_tokens=2),
        replace(QUANTISE, whole_channels=1, feedback="ef21"),
    ),
    compressed("quantise-first-token", "subspace", replace(QUANTISE, whole_tokens=1), QUANTISE),
    compressed("lowrank", "none", CompressionConfig(kind="lowrank", rank=4), CompressionConfig(kind="lowrank", rank=4)),
    compressed("ef", "subspace", replace(TOPK, feedback="ef"), replace(QUANTISE, feedback="ef")),
    compressed("ef21", "none", replace(QUANTISE, feedback="ef21"), replace(TOPK, feedback="ef21")),
    compressed(
        "ef21-mask",
        "none",
        replace(TOPK, feedback="ef21"),
        CompressionConfig(kind="topk", reuse_mask=True, feedback="ef"),
    ),
    compressed("aqsgd", "none", replace(QUANTISE, bits=2, feedback="aqsgd"), QUANTISE),
    Case("keel", BoundaryConfig(), projection=KEEL),
    Case("keel-int4", BoundaryConfig(forward="int4", backward="int4"), projection=KEEL),
    Case("learned", BoundaryConfig(), projection=ProjectionConfig(kind="learned", width=6, token_prior_rank=4)),
    Case(
        "bottleneck",
        BoundaryConfig(forward="bf16", backward="bf16"),
        projection=ProjectionConfig(kind="bottleneck", width=6),
    ),
    Case("chats", BoundaryConfig(forward="bf16", backward="int8"), chats=True),
    Case(
        "chats-aqsgd",
        BoundaryConfig(states=replace(QUANTISE, feedback="aqsgd"), gradients=replace(TOPK, feedback="ef21")),
        chats=True,
    ),
    Case("chunked-loss", BoundaryConfig(forward="int8", backward="int8"), max_logits=TOKENS * VOCABULARY // 3),
]


FEW = ("llama-subspace-fp32-fp32", "aqsgd", "keel-int4", "chunked-loss", "chats")
"""A basis that changes, a memory of samples, a neck, a backward pass of our own, a loss of some tokens alone: what a
schedule could get wrong."""


def cases_for(schedule: str, *, few: bool = False) -> list[Case]:
    """A backward pass that is split is not for necks."""
    named = [case for case in CASES if not few or case.name in FEW]
    return [case for case in named if schedule != "ZBVZeroBubble" or case.projection.width is None]


def batch_size(segments: int) -> int:
    """As many micro-batches of one sample as the deepest schedules need."""
    return max(4, segments)


def config_of(case: Case, segments: int, schedule: str) -> RunConfig:
    sizes = {"n_kv_heads": 1, "hidden_dim": 48} if case.family == "llama" else {"dropout": 0.1}
    return RunConfig(
        model=ModelSettings(
            preset=f"{case.family}-tiny",
            dim=32,
            n_layers=segments,
            n_heads=2,
            max_seq_len=TOKENS,
            boundaries=tuple(range(1, segments)),
            subspace=SubspaceConfig(width=6) if case.in_subspace else SubspaceConfig(),
            projection=case.projection,
            **sizes,
        ),
        training=TrainingConfig(steps=case.steps, global_batch_size=batch_size(segments), seq_len=TOKENS),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule=schedule),
        boundary=case.boundary,
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
        basis=BasisConfig(interval=case.basis_interval),
    )


def batch_of(case: Case, number: int, segments: int) -> np.ndarray:
    ids_BW = SyntheticLanguage(VOCABULARY, seed=1).batch(number, batch_size(segments), TOKENS).numpy()
    return flagged(ids_BW, seed=number) if case.chats else ids_BW


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def run_case(case: Case, segments: int, schedule: str, group: dist.ProcessGroup | None = None) -> dict:
    """Steps and changes of basis: losses and norms, then hashes of gradients, weights, moments, basis, memories.

    Every third batch comes again, so that a method that remembers samples meets them twice.
    """
    with patch.object(model_family, "MAX_LOGITS", case.max_logits):
        return _run_case(case, segments, schedule, group)


def _run_case(case: Case, segments: int, schedule: str, group: dist.ProcessGroup | None) -> dict:
    config = config_of(case, segments, schedule)
    engine = Engine(config, config.model.resolve(VOCABULARY), group, chats=case.chats)
    seen, gradients = [], {}
    for step in range(case.steps):
        outcome = engine.step(step, batch_of(case, step % 3, segments), lr=3e-3)
        assert outcome.fault is None
        seen.append([outcome.loss, outcome.grad_norm])
        gradients = {name: digest(p.grad) for name, p in engine.parameters.items()}
        if engine.basis_is_due(step + 1):
            engine.update_basis(batch_of(case, 1000 + step, segments))
    validation, _ = engine.evaluate([batch_of(case, 2000, segments)])
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
        "codec_states": {
            f"{layer}/{name}": digest(tensor)
            for layer, state in codec_states(engine.methods, engine.local_segments).items()
            for name, tensor in state.items()
        },
        "stated": [
            [method.forward_nbytes, method.backward_nbytes, method.at_inference.forward_nbytes]
            for method in engine.methods
        ],
    }


def segments_for(schedule: str, processes: int) -> int:
    return processes * SCHEDULE_LAYOUTS[schedule].stages_per_process
