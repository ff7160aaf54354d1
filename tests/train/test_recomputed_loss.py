"""Losses that are computed again from checkpoints are those of the steps that followed, to the bit."""

from dataclasses import replace

import pytest

from tests.programs import steps_of
from thinpipe.checkpoint import Checkpoint
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.run import CheckpointConfig, ParallelismConfig
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.training.data_loading import LocalTokens
from thinpipe.training.recomputed_loss import recompute_loss
from thinpipe.training.trainer import Trainer

DENSE = {"subspace": SubspaceConfig()}
CASES = {
    "subspace": ({}, {}, {}),
    "keel": (
        DENSE | {"projection": ProjectionConfig(width=8, token_prior_rank=4, token_prior_window=2)},
        {"forward": "int4", "backward": "int4"},
        {},
    ),
    "feedback": (DENSE, {"states": CompressionConfig(kind="topk", keep=0.25, feedback="ef21")}, {}),
    "bf16-mixed": (DENSE, {"forward": "int8"}, {"precision": "bf16-mixed"}),
    "bf16": (DENSE, {}, {"precision": "bf16"}),
}


@pytest.fixture(params=CASES)
def finished(run_config, request):
    model, boundary, training = CASES[request.param]
    config = replace(
        run_config,
        model=replace(run_config.model, **model),
        boundary=BoundaryConfig(**boundary),
        training=replace(run_config.training, **training),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
        checkpoint=CheckpointConfig(interval=4, keep_latest_k=0),
    )
    Trainer(config).train()
    return config


def test_losses_are_those_of_the_next_steps(finished):
    losses = {event.step: event.loss for event in steps_of(finished)}
    folder = checkpoints_path(finished.job.dump_folder)
    for step in (4, 8):
        checkpoint = Checkpoint.open(folder / f"step-{step:08}")
        seen = []
        assert recompute_loss(checkpoint, LocalTokens(finished), on_segment=seen.append) == losses[step + 1]
        assert seen == list(range(len(finished.model.resolve(64).segments)))
