"""The cases of the contract test, and what a case comes to: shared by the twin in the test and the worker processes."""

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests.reference.language import SyntheticLanguage
from thinpipe.boundary.formats import FORMATS
from thinpipe.boundary.registry import METHODS
from thinpipe.boundary.settings import BoundarySection
from thinpipe.models.config import SubspaceConfig
from thinpipe.pipeline.schedules import SCHEDULES
from thinpipe.train.config import (
    BasisSection,
    ModelSection,
    ParallelismSection,
    RunConfig,
    SchedulerSection,
    TrainingSection,
)
from thinpipe.train.engine import Engine

STEPS, TOKENS, VOCABULARY = 20, 12, 64


@dataclass(frozen=True)
class Case:
    """One boundary method in one pair of number formats; GPT-2 has dropout, which must not differ either."""

    method: str
    forward: str
    backward: str
    family: str = "llama"

    @property
    def name(self) -> str:
        return f"{self.family}-{self.method}-{self.forward}-{self.backward}"


CASES = [
    *(Case(method, number_format, number_format) for method in METHODS for number_format in FORMATS),
    Case("subspace", "int8", "int4"),
    Case("subspace", "fp32", "int8", family="gpt2"),
]


def batch_size(segments: int) -> int:
    """As many micro-batches of one sample as the deepest schedules need."""
    return max(4, segments)


def config_of(case: Case, segments: int, schedule: str) -> RunConfig:
    confined = case.method == "subspace"
    sizes = {"n_kv_heads": 1, "hidden_dim": 48} if case.family == "llama" else {"dropout": 0.1}
    return RunConfig(
        model=ModelSection(
            preset=f"{case.family}-tiny",
            dim=32,
            n_layers=segments,
            n_heads=2,
            max_seq_len=TOKENS,
            boundaries=tuple(range(1, segments)),
            subspace=SubspaceConfig(width=6) if confined else SubspaceConfig(),
            **sizes,
        ),
        training=TrainingSection(steps=STEPS, global_batch_size=batch_size(segments), seq_len=TOKENS),
        parallelism=ParallelismSection(pipeline_parallel_microbatch_size=1, pipeline_parallel_schedule=schedule),
        boundary=BoundarySection(method=case.method, forward=case.forward, backward=case.backward),
        lr_scheduler=SchedulerSection(warmup_steps=1),
        basis=BasisSection(interval=8),
    )


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def run_case(case: Case, segments: int, schedule: str, group: dist.ProcessGroup | None = None) -> dict:
    """20 steps with two changes of basis: losses and norms, then hashes of gradients, weights, moments, basis."""
    config = config_of(case, segments, schedule)
    engine = Engine(config, config.model.resolve(VOCABULARY), group)
    language, batch = SyntheticLanguage(VOCABULARY, seed=1), batch_size(segments)
    seen, gradients = [], {}
    for step in range(STEPS):
        outcome = engine.step(step, language.batch(step, batch, TOKENS).numpy(), lr=3e-3)
        assert outcome.culprit is None
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
        "stated": [[method.forward_nbytes, method.backward_nbytes] for method in engine.methods],
    }


def segments_for(schedule: str, processes: int) -> int:
    return processes * SCHEDULES[schedule].stages_per_process
