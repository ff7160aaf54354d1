"""Losses that are computed again from checkpoints are those of the steps that followed, to the bit."""

from dataclasses import replace

import pytest

from tests.programs import steps_of
from thinpipe.checkpoint import Checkpoint, CheckpointFolder
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.run import CheckpointConfig, ParallelismConfig
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.data import Cursor
from thinpipe.swarm.hub.first_checkpoint import make_first_checkpoint
from thinpipe.training.data_loading import LocalTokens
from thinpipe.training.recomputed_loss import recompute_losses
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
        found = recompute_losses(checkpoint, LocalTokens(finished), on_segment=seen.append)
        assert found.next_step == losses[step + 1]
        assert found.own_batch is None
        assert seen == list(range(len(finished.model.resolve(64).segments)))


def test_the_loss_of_a_batch_is_that_of_validation(finished):
    """And reading it changes nothing of the other, although both share the boundaries' codec state."""
    source = LocalTokens(finished)
    batch = source.batch(Cursor(samples_seen=3))
    trainer = Trainer(finished)
    checkpoint = Checkpoint.open(checkpoints_path(finished.job.dump_folder) / "step-00000004")
    trainer.engine.restore(checkpoint)
    expected, _ = trainer.engine.evaluate([batch])
    losses = {event.step: event.loss for event in steps_of(finished)}
    found = recompute_losses(checkpoint, source, batch)
    assert (found.next_step, found.own_batch) == (losses[5], expected)


def test_the_first_weights_have_a_loss_too(run_config):
    folder = CheckpointFolder(checkpoints_path(run_config.job.dump_folder))
    first = make_first_checkpoint(run_config, LocalTokens(run_config).dataset_info, folder)
    Trainer(run_config).train()
    found = recompute_losses(first, LocalTokens(run_config))
    assert found.next_step == steps_of(run_config)[0].loss
