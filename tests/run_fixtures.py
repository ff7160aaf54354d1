"""A small run that takes a second: tokens of a synthetic language and settings to train on them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.programs import Program
from tests.reference.language import SyntheticLanguage
from thinpipe.config.model import SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    JobConfig,
    LRSchedulerConfig,
    ModelSettings,
    ParallelismConfig,
    RunConfig,
    TrainingConfig,
    ValidationConfig,
)
from thinpipe.data import ShardWriter, Vocabulary

VOCABULARY = Vocabulary(size=64, end_of_text_id=0, tokenizer_sha256="0" * 64)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    ids = SyntheticLanguage(64, seed=1).batch(0, 1, 20_000)[0].numpy()
    for side, part in (("train", ids[:16_000]), ("validation", ids[16_000:])):
        with ShardWriter(folder / side, VOCABULARY, source="synthetic", max_shard_tokens=1_000_000) as writer:
            writer.add(part.astype(np.uint32), text_nbytes=(len(part) + 1) * 3)
            writer.finish()
    return folder


@pytest.fixture
def run_config(tokens, tmp_path) -> RunConfig:
    return RunConfig(
        job=JobConfig(dump_folder=tmp_path / "run"),
        data=DataConfig(path=tokens),
        model=ModelSettings(
            preset="llama-tiny",
            dim=32,
            n_heads=2,
            n_kv_heads=1,
            hidden_dim=64,
            max_seq_len=32,
            boundaries=(1, 3),
            subspace=SubspaceConfig(width=4),
        ),
        training=TrainingConfig(steps=12, global_batch_size=8, seq_len=16, device="cpu"),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=4),
        lr_scheduler=LRSchedulerConfig(warmup_steps=3),
        basis=BasisConfig(interval=5),
        checkpoint=CheckpointConfig(interval=4, keep_latest_k=0),
        validation=ValidationConfig(freq=6, steps=2),
    )


@pytest.fixture
def gpt2_config(run_config) -> RunConfig:
    """GPT-2 with dropout, so that the random state matters too."""
    model = ModelSettings(
        preset="gpt2-tiny",
        dim=32,
        n_heads=2,
        max_seq_len=32,
        dropout=0.1,
        boundaries=(2,),
        subspace=SubspaceConfig(width=4),
    )
    return replace(run_config, model=model)


@pytest.fixture
def programs(tmp_path):
    """Starts commands, and ends what a test leaves."""
    started = []

    def start(name, *arguments, **how):
        started.append(Program(tmp_path / "printed", name, *arguments, **how))
        return started[-1]

    yield start
    for program in started:
        program.stop()
