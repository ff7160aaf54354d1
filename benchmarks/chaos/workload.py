"""The run that chaos is made of: a small model in as many segments as there are stages, and tokens made from a seed.

Its boundaries remember what they have sent (EF21), so that what they remember is part of what must come back.
"""

import random
from pathlib import Path

import numpy as np

from benchmarks.chaos.config import ChaosConfig
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.hub import HubConfig, HubSettings
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
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
from thinpipe.config.toml import dump_toml
from thinpipe.core.hashing import text_sha256
from thinpipe.data import ShardWriter, Vocabulary

DIM, LAYERS, WORDS, SEQ_LEN = 128, 8, 256, 32
ENDLESS_STEPS = 1_000_000
"""More than anyone waits for: the clock ends the run."""
TRAIN_TOKENS, VALIDATION_TOKENS = 200_000, 2_000
_KEEP = 4
"""Commits that stay at the hub; what is older is in the log."""
_TIMEOUT_SECONDS = 120.0


def run_config(config: ChaosConfig, dump_folder: Path) -> RunConfig:
    """The same numbers, whoever computes them."""
    blocks = LAYERS // config.stages
    return RunConfig(
        job=JobConfig(dump_folder=dump_folder),
        data=DataConfig(path=tokens_folder(config)),
        model=ModelSettings(
            preset="llama-tiny",
            dim=DIM,
            n_heads=2,
            n_kv_heads=1,
            hidden_dim=DIM,
            n_layers=LAYERS,
            max_seq_len=SEQ_LEN,
            boundaries=tuple(blocks * stage for stage in range(1, config.stages)),
            subspace=SubspaceConfig(width=DIM // 8),
        ),
        training=TrainingConfig(
            steps=ENDLESS_STEPS, global_batch_size=2 * config.stages, seq_len=SEQ_LEN, device="cpu"
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_microbatch_size=2,
            timeout_seconds=_TIMEOUT_SECONDS,
        ),
        boundary=BoundaryConfig(
            forward="bf16", gradients=CompressionConfig(kind="quantise", bits=8, per="token", feedback="ef21")
        ),
        lr_scheduler=LRSchedulerConfig(warmup_steps=10),
        basis=BasisConfig(interval=50),
        checkpoint=CheckpointConfig(interval=config.steps_per_commit, keep_latest_k=_KEEP),
        validation=ValidationConfig(freq=0),
        debug=DebugConfig(seed=config.seed),
    )


def hub_config(config: ChaosConfig, dump_folder: Path, address: str) -> HubConfig:
    section = HubSettings(
        peers=config.stages,
        use_all_peers=True,
        address=address,
        up="1gbps",
        down="1gbps",
        invites=0,
        patience_seconds=config.patience_seconds,
        heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
    )
    return HubConfig(**vars(run_config(config, dump_folder)), hub=section)


def numbers_sha256(config: ChaosConfig) -> str:
    """Of all that decides the weights: runs that share it have one truth."""
    return text_sha256(dump_toml(run_config(config, Path("anywhere"))).replace(str(tokens_folder(config)), "tokens"))


def tokens_folder(config: ChaosConfig) -> Path:
    return config.folder.absolute() / "tokens"


def make_tokens(config: ChaosConfig) -> None:
    """Words that follow each other in a way that can be learned a little."""
    folder = tokens_folder(config)
    if folder.exists():
        return
    draw = random.Random(f"thinpipe chaos tokens {config.seed}")
    table = [[1 + draw.randrange(WORDS - 1) for _ in range(4)] for _ in range(WORDS)]
    words = [1]
    for _ in range(TRAIN_TOKENS + VALIDATION_TOKENS):
        words.append(table[words[-1]][draw.randrange(4)] if draw.random() < 0.9 else 1 + draw.randrange(WORDS - 1))
    vocabulary = Vocabulary(size=WORDS, end_of_text_id=0, tokenizer_sha256="0" * 64)
    ids = np.array(words, dtype=np.uint32)
    partial = folder.with_name("tokens.partial")
    for side, part in (("train", ids[:TRAIN_TOKENS]), ("validation", ids[TRAIN_TOKENS:])):
        with ShardWriter(partial / side, vocabulary, source="synthetic", max_shard_tokens=1_000_000) as writer:
            writer.add(part, text_nbytes=4 * (len(part) + 1))
            writer.finish()
    partial.rename(folder)
