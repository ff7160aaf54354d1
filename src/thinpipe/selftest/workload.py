"""What the self-test computes: small Llama models and a synthetic language, both made from seeds."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from thinpipe.config.model import SubspaceConfig
from thinpipe.config.precision import Precision
from thinpipe.config.run import (
    BasisConfig,
    DataConfig,
    DebugConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.data import TokenizeConfig, prepare

VOCABULARY = 64
_SUCCESSORS = 4
LEARNING_RATE = 3e-3


def language(step: int, batch: int, tokens: int, vocabulary: int = VOCABULARY) -> npt.NDArray[np.int64]:
    """Token ids [batch, tokens + 1] of a first-order Markov chain, the same for the same step. Every id has four
    equally likely successors, so the loss of a model falls from ln(vocabulary) towards ln(4) = 1.39 nats."""
    rng = np.random.Generator(np.random.Philox(key=11, counter=step + 1))
    ids = np.empty((batch, tokens + 1), dtype=np.int64)
    ids[:, 0] = rng.integers(vocabulary, size=batch)
    chosen = rng.integers(_SUCCESSORS, size=ids.shape)
    for position in range(1, tokens + 1):
        ids[:, position] = (ids[:, position - 1] * 7 + 13 * chosen[:, position] + 3) % vocabulary
    return ids


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a model and of its batches."""

    dim: int
    layers: int
    batch: int
    """Sequences per step."""
    microbatch: int
    """Sequences per micro-batch."""
    tokens: int
    """Tokens per sequence."""
    vocabulary: int = VOCABULARY


SMALL = Size(dim=64, layers=2, batch=4, microbatch=4, tokens=32)
"""Model of the exactness checks."""


def run_config(size: Size, device: torch.device, precision: Precision, *, steps: int = 1000) -> RunConfig:
    """A dense Llama with half as many heads for keys and values as for queries, without boundaries."""
    heads = max(2, size.dim // 64)
    return RunConfig(
        model=ModelSettings(
            preset="llama-tiny",
            dim=size.dim,
            n_layers=size.layers,
            n_heads=heads,
            n_kv_heads=heads // 2,
            hidden_dim=8 * size.dim // 3 // 32 * 32,
            max_seq_len=size.tokens,
        ),
        training=TrainingConfig(
            steps=steps,
            global_batch_size=size.batch,
            seq_len=size.tokens,
            precision=precision,
            device=str(device),
        ),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=size.microbatch),
        lr_scheduler=LRSchedulerConfig(warmup_steps=1),
    )


def cut_run(
    folder: Path, name: str, device: torch.device, *, processes: int, steps: int, deterministic: bool
) -> RunConfig:
    """A run of a subspace model of two segments, with a change of basis, on the tokens in `folder`."""
    config = run_config(SMALL, device, "fp32", steps=steps)
    return replace(
        config,
        job=JobConfig(dump_folder=folder / name),
        data=DataConfig(path=folder / "tokens"),
        model=replace(config.model, boundaries=(SMALL.layers // 2,), subspace=SubspaceConfig(width=8)),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=processes, pipeline_parallel_microbatch_size=1, timeout_seconds=60
        ),
        basis=BasisConfig(interval=max(1, steps // 2)),
        validation=ValidationConfig(freq=0),
        debug=DebugConfig(deterministic=deterministic),
    )


def write_tokens(folder: Path) -> None:
    """Tokens of the text that comes with thinpipe, for `cut_run`."""
    prepare(
        TokenizeConfig(
            sources=("sample:validation",),
            validation_sources=("sample:validation",),
            output=folder / "tokens",
            vocab_size=300,
        )
    )
