"""Rounds of replicas in one process, the reference: what they compute, how they merge, and that a resume is exact."""

import re
import shutil
from dataclasses import replace

import msgspec
import pytest
import torch

from tests.programs import events_of, files_of, steps_of, train_until
from tests.train.test_processes import finish, placed, start
from thinpipe.checkpoint import CheckpointFolder
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.model import ProjectionConfig, SubspaceConfig
from thinpipe.config.rounds import RoundsConfig
from thinpipe.config.run import BasisConfig, CheckpointConfig, JobConfig, ModelSettings
from thinpipe.core.errors import UserError
from thinpipe.core.events import Merged, Started, Stopped, Validated
from thinpipe.training.trainer import Trainer

STEPS = 20
MEAN = {"format": "fp32", "update_format": "fp32"}


@pytest.fixture
def config(run_config):
    return replace(
        run_config,
        training=replace(run_config.training, steps=STEPS),
        basis=BasisConfig(interval=0),
        validation=replace(run_config.validation, freq=7, steps=1),
        checkpoint=CheckpointConfig(interval=6, keep_latest_k=0),
    )


def with_rounds(config, name="rounds", **settings):
    folder = config.job.dump_folder.parent / name
    return replace(config, job=JobConfig(dump_folder=folder), rounds=RoundsConfig(**settings))


def trained(config):
    assert Trainer(config).train() == "finished"
    return config


def weights_at(config, step):
    checkpoint = CheckpointFolder(config.job.dump_folder / "checkpoints").open(step)
    return {
        name: tensor
        for file in checkpoint.manifest.files
        for name, tensor in checkpoint.layer(file.removesuffix(".safetensors")).items()
        if ":" not in name and not name.startswith("space.")
    }


def test_every_batch_is_trained_on_once_and_merges_are_told(config):
    config = trained(with_rounds(config, steps=4, replicas=3))
    steps, merges = steps_of(config), events_of(config, Merged)
    assert [event.step for event in steps] == [*range(1, STEPS + 1)]
    assert [(event.round, event.step, event.steps) for event in merges] == [(1, 12, [4, 4, 4]), (2, 20, [3, 3, 2])]
    assert all(event.update_norm > 0 and event.nbytes > 0 for event in merges)
    assert [event.step for event in events_of(config, Validated)] == [12, 20], "only where all have the same weights"


def test_a_replica_begins_each_round_from_the_shared_weights(config):
    """The second replica does not see what the first one has learned: it computes what a run of its own does."""
    two = trained(with_rounds(config, "two", steps=10, replicas=2))
    one = trained(with_rounds(config, "one", steps=10, replicas=1))
    losses = {name: [event.loss for event in steps_of(each)] for name, each in (("two", two), ("one", one))}
    assert losses["two"][:10] == losses["one"][:10]
    assert losses["two"][10] != losses["one"][10]


def test_one_replica_without_rounding_is_a_run_whose_moments_start_anew(config):
    """The mean of one: its own weights, but for the rounding of a difference."""
    whole = trained(with_rounds(config, "whole", steps=STEPS, **MEAN))
    plain = trained(with_rounds(config, "plain"))
    assert [event.loss for event in steps_of(whole)] == [event.loss for event in steps_of(plain)]
    found, expected = weights_at(whole, STEPS), weights_at(plain, STEPS)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


def test_the_merged_weights_are_the_mean_of_the_replicas(config):
    merged = weights_at(trained(with_rounds(config, "both", steps=10, replicas=2, **MEAN)), STEPS)
    apart = []
    for replica in range(2):
        trainer = Trainer(with_rounds(config, f"replica{replica}"))
        trainer.checkpoints.folder.mkdir(parents=True, exist_ok=True)
        trainer._log, trainer._display = None, _Silent()
        for batch in range(10 * replica, 10 * replica + 10):
            trainer._go_to(batch)
            trainer._step()
        apart.append(trainer.engine.weights())
    for name, value in merged.items():
        torch.testing.assert_close(value, (apart[0][name] + apart[1][name]) / 2, rtol=1e-5, atol=1e-6)


class _Silent:
    def show(self, *_): ...


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"error_feedback": True, "momentum": 0.8, "momentum_warmup": 3, "lr": 0.9},
        {"format": "fp32", "update_format": "fp32", "momentum": 0.8},
    ],
    ids=["int4", "error feedback and momentum", "fp32"],
)
def test_a_run_stopped_in_the_middle_of_a_round_ends_with_the_same_bits(config, settings):
    whole = trained(with_rounds(config, "whole", steps=3, replicas=2, **settings))
    parts = with_rounds(config, "parts", steps=3, replicas=2, **settings)
    train_until(parts, 8)
    assert files_of(parts, 6)
    trained(parts)
    assert files_of(parts, STEPS) == files_of(whole, STEPS)
    assert [event.round for event in events_of(parts, Merged)] == [1, 2, 3, 4]


def saved_steps(config):
    return sorted(int(path.name[5:]) for path in (config.job.dump_folder / "checkpoints").glob("step-*"))


def test_nothing_is_saved_but_merged_weights(config):
    parts = with_rounds(config, "parts", steps=8, replicas=2)
    train_until(parts, 5)
    assert saved_steps(parts) == [0]
    trained(parts)
    assert saved_steps(parts) == [0, 16, STEPS]


@pytest.mark.parametrize(("stopped_after", "kept"), [(7, 6), (6, 6), (5, 0), (STEPS, STEPS)])
def test_a_stop_saves_what_is_merged_and_loses_nothing_but_the_round(config, stopped_after, kept):
    """Also where no checkpoint is due for long: the last replica's last step completes a round."""
    config = replace(config, checkpoint=CheckpointConfig(interval=1000, keep_latest_k=0))
    settings = {"steps": 3, "replicas": 2, "error_feedback": True, "momentum": 0.8}
    whole, parts = (with_rounds(config, name, **settings) for name in ("whole", "parts"))
    train_until(parts, stopped_after)
    assert saved_steps(parts) == [kept]
    stopped = events_of(parts, Stopped)[-1]
    assert (stopped.step, stopped.reason) == (kept, "signal")
    trained(parts)
    assert files_of(parts, STEPS) == files_of(trained(whole), STEPS)


def test_what_error_feedback_and_momentum_have_left_is_not_used_without_them(config):
    first = with_rounds(config, "first", steps=3, replicas=2, error_feedback=True, momentum=0.8)
    train_until(first, 6)
    trainer = Trainer(replace(first, rounds=RoundsConfig(steps=3, replicas=2)))
    assert trainer.train() == "finished"
    assert trainer.sync.state() == {}


def test_a_model_of_a_checkpoint_is_looked_at_too(config):
    subspace = trained(with_rounds(config, "subspace"))
    model = ModelSettings(initial=subspace.job.dump_folder / "checkpoints" / f"step-{STEPS:08}")
    begun = replace(with_rounds(config, "begun", steps=3), model=model, basis=BasisConfig(interval=5))
    with pytest.raises(UserError, match=r"basis\.interval = 0"):
        Trainer(begun)


def test_a_run_of_a_version_without_rounds_resumes_without_a_change(config):
    old = with_rounds(config, "old")
    train_until(old, 6)
    folder = CheckpointFolder(old.job.dump_folder / "checkpoints")
    saved = folder.open(6)
    without = re.sub(r"\[rounds\]\n(.+\n)*", "", saved.manifest.run)
    assert "rounds" not in without
    folder.begin(6)
    for name in saved.manifest.files:
        shutil.copy(saved.path / name, folder.partial(6) / name)
    folder.commit(msgspec.structs.replace(saved.manifest, run=without), saved.manifest.files)
    trained(old)
    assert events_of(old, Started)[-1].changed == []


def test_processes_of_a_pipeline_merge_to_the_bits_of_one(config):
    settings = {"steps": 3, "replicas": 2, "momentum": 0.8, "error_feedback": True}
    alone = trained(with_rounds(config, "alone", **settings))
    together = placed(with_rounds(config, **settings), 2, "together")
    code, printed = finish(start(together))
    assert code == 0, printed
    assert files_of(together, STEPS) == files_of(alone, STEPS)
    assert [(event.steps, event.nbytes) for event in events_of(together, Merged)] == [
        (event.steps, event.nbytes) for event in events_of(alone, Merged)
    ]


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_rounded_contributions_cost_little(config, form):
    exact = weights_at(trained(with_rounds(config, "exact", steps=5, replicas=2, **MEAN)), STEPS)
    rounded = weights_at(trained(with_rounds(config, form, steps=5, replicas=2, format=form)), STEPS)
    first = Trainer(with_rounds(config, "start")).engine.weights()
    for name, value in exact.items():
        moved = (value - first[name]).norm()
        assert (rounded[name] - value).norm() <= (0.5 if form == "int4" else 0.05) * moved + 1e-6, name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"basis": BasisConfig(interval=5)}, "basis.interval = 0"),
        ({"boundary": BoundaryConfig(gradients=CompressionConfig(kind="quantise", bits=4, feedback="ef"))}, "none"),
        ({"precision": "bf16"}, "bf16-mixed"),
        ({"learned": True}, "keel"),
    ],
)
def test_what_cannot_be_merged_is_refused(config, changes, says):
    if changes.pop("learned", False):
        model = replace(config.model, subspace=SubspaceConfig(), projection=ProjectionConfig(width=8, kind="learned"))
        changes = {"model": model}
    if "precision" in changes:
        changes = {"training": replace(config.training, precision="bf16")}
    with pytest.raises(UserError, match=says):
        replace(config, rounds=RoundsConfig(steps=4), **changes)


@pytest.mark.parametrize("settings", [{"replicas": 2}, {"steps": -1}, {"replicas": 0}, {"lr": 0.0}, {"momentum": 1.0}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(UserError):
        RoundsConfig(**settings)
