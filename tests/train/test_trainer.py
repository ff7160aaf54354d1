"""The training loop: it learns, it logs, it resumes bit for bit, it stops well."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.programs import files_of
from tests.warm import WarmProcess
from thinpipe.checkpoint import Checkpoint, CheckpointFolder
from thinpipe.config.boundary import BoundaryConfig
from thinpipe.config.link import LinkConfig
from thinpipe.config.model import ExecutionConfig, ProjectionConfig, SubspaceConfig
from thinpipe.config.run import (
    BasisConfig,
    CheckpointConfig,
    DataConfig,
    JobConfig,
    ModelSettings,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
)
from thinpipe.config.toml import dump_toml, load_toml
from thinpipe.core.errors import UserError
from thinpipe.core.events import (
    BasisChanged,
    Retried,
    Saved,
    SaveFailed,
    Skipped,
    Started,
    Step,
    Stopped,
    Validated,
    read_events,
)
from thinpipe.data import Cursor
from thinpipe.training.engine import Engine
from thinpipe.training.trainer import Trainer
from thinpipe.training.validation import validate


def events(config, kind):
    return [event for event in read_events(config.job.dump_folder / "events.jsonl") if isinstance(event, kind)]


def in_folder(config, name):
    return replace(config, job=JobConfig(dump_folder=config.job.dump_folder.parent / name))


def with_steps(config, steps):
    return replace(config, training=replace(config.training, steps=steps))


def all_tensors(checkpoint: Checkpoint):
    return {
        (name, key): tensor
        for name in checkpoint.manifest.files
        for key, tensor in checkpoint.layer(name.removesuffix(".safetensors")).items()
    }


def assert_same_checkpoint(first: Checkpoint, second: Checkpoint):
    one, two = all_tensors(first), all_tensors(second)
    assert one.keys() == two.keys()
    assert [key for key in one if not torch.equal(one[key], two[key])] == []
    assert first.manifest.basis_version == second.manifest.basis_version
    assert first.manifest.samples_seen == second.manifest.samples_seen


def test_a_run_learns_and_says_what_it_does(run_config):
    config = with_steps(run_config, 60)
    assert Trainer(config).train() == "finished"
    steps = events(config, Step)
    assert [event.step for event in steps] == list(range(1, 61))
    assert steps[-1].loss < steps[0].loss - 0.2
    assert steps[-1].tokens == 60 * 8 * 16
    assert [event.step for event in events(config, BasisChanged)] == list(range(5, 61, 5))
    assert [event.step for event in events(config, Validated)] == list(range(6, 61, 6))
    validated = events(config, Validated)[-1]
    # One token is three bytes in this data set.
    assert validated.bits_per_byte == pytest.approx(validated.loss / math.log(2) / 3, rel=1e-6)
    assert events(config, Stopped)[-1].reason == "finished"


@pytest.mark.parametrize("family", ["run_config", "gpt2_config"])
@pytest.mark.parametrize("second_moment", ["row", "element"])
def test_resume_is_bit_for_bit_the_uninterrupted_run(family, second_moment, request):
    """Stops before, at, between and after the basis updates at 5 and 10."""
    config = replace(
        request.getfixturevalue(family),
        optimizer=OptimizerConfig(second_moment=second_moment),
        checkpoint=CheckpointConfig(interval=1, keep_latest_k=0),
    )
    Trainer(config).train()
    whole, _ = CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete()
    assert whole is not None
    assert whole.manifest.basis_version == 2
    assert_resumes_equal(config, whole, (4, 5, 8, 11))


@pytest.mark.parametrize("kind", ["keel", "learned", "bottleneck"])
def test_resume_with_projections_is_bit_for_bit_the_uninterrupted_run(kind, run_config):
    """Their gradients are rounded at random, and the columns of `learned` have a rule of their own."""
    projection = ProjectionConfig(width=8, kind=kind, token_prior_rank=4, token_prior_window=2)
    config = replace(
        run_config,
        model=replace(run_config.model, projection=projection, subspace=SubspaceConfig(), boundaries=(1, 2)),
        boundary=BoundaryConfig(forward="int4", backward="int4"),
        basis=BasisConfig(interval=0),
        checkpoint=CheckpointConfig(interval=1, keep_latest_k=0),
    )
    Trainer(config).train()
    whole, _ = CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete()
    assert_resumes_equal(config, whole, (3, 7))


def assert_resumes_equal(config, whole, stops):
    losses = [event.loss for event in events(config, Step)]
    for stop in stops:
        resumed = in_folder(config, f"resumed-{stop}")
        target = resumed.job.dump_folder / "checkpoints"
        target.mkdir(parents=True)
        os.rename(whole.path.parent / f"step-{stop:08d}", target / f"step-{stop:08d}")
        torch.manual_seed(999)  # nothing of the process may leak into the run
        Trainer(resumed).train()
        again, _ = CheckpointFolder(target).newest_complete()
        assert_same_checkpoint(whole, again)
        assert [event.loss for event in events(resumed, Step)] == losses[stop:]
        assert events(resumed, Started)[0].step == stop


def test_the_number_of_microbatches_only_regroups_the_sum(run_config):
    losses = {}
    for size in (8, 2):
        config = replace(
            in_folder(run_config, f"micro-{size}"),
            parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=size),
            training=replace(run_config.training, precision="fp64"),
        )
        Trainer(config).train()
        losses[size] = [event.loss for event in events(config, Step)]
    assert losses[8] == pytest.approx(losses[2], rel=1e-9)


def test_microbatch_gradients_are_summed_and_divided_once(run_config):
    engine = Engine(run_config, run_config.model.resolve(64))
    ids = Trainer(run_config).batch_loader.batch(Cursor())
    seen = {}
    engine._update = lambda norm, lr, _scale: seen.update(
        norm=norm, lr=lr
    )  # keep the gradients as they are before clipping
    outcome = engine.step(0, ids, 0.5)
    expected = Engine(run_config, run_config.model.resolve(64)).model
    whole = torch.from_numpy(ids)
    for part in whole.split(4):
        logits = expected(part[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).backward()
    squares = 0.0
    for (name, got), want in zip(engine.model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(got.grad, want.grad / 2), name
        squares += float((want.grad / 2).norm()) ** 2
    assert outcome.grad_norm == pytest.approx(math.sqrt(squares), rel=1e-12)
    assert seen == {"norm": outcome.grad_norm, "lr": 0.5}


def test_clipping_scales_the_update_down(run_config):
    config = replace(run_config, training=replace(run_config.training, max_norm=1e-3))
    engine = Engine(config, config.model.resolve(64))
    trainer = Trainer(config)
    outcome = engine.step(0, trainer.batch_loader.batch(trainer.cursor), 0.1)
    norm = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in engine.model.parameters()))
    assert outcome.grad_norm > 0.1
    assert norm == pytest.approx(1e-3, rel=1e-2)


@pytest.mark.parametrize("culprit", ["loss", "blocks.2.mlp.up_proj.weight"])
def test_a_step_that_is_not_finite_changes_nothing_and_three_end_the_run(run_config, culprit):
    trainer = Trainer(run_config)
    model = trainer.engine.model
    if culprit == "loss":
        model.last.norm.weight.data.fill_(float("nan"))
    else:
        parameter = dict(model.named_parameters())[culprit]
        parameter.register_hook(lambda gradient: gradient * float("inf"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trace = trainer.engine.tracker.trace.clone()
    assert trainer.train() == "not_finite"
    skipped = events(run_config, Skipped)
    assert [(event.step, event.culprit) for event in skipped] == [(1, culprit), (2, culprit), (3, culprit)]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(trainer.engine.tracker.trace, trace)
    assert not list((run_config.job.dump_folder / "checkpoints").glob("*"))


def test_one_bad_step_is_tried_again_and_leaves_no_trace(run_config):
    undisturbed = in_folder(run_config, "undisturbed")
    Trainer(undisturbed).train()
    trainer = Trainer(run_config)
    parameter = trainer.engine.model.blocks[0].mlp.up_proj.weight
    calls = []

    def poison_third_step(gradient):
        calls.append(None)
        return gradient * float("nan") if len(calls) == 5 else gradient  # two micro-batches a step

    parameter.register_hook(poison_third_step)
    assert trainer.train() == "finished"
    (retried,) = events(run_config, Retried)
    assert (retried.step, retried.culprit) == (3, "blocks.0.mlp.up_proj.weight")
    assert (retried.sender, retried.boundary) == ("process 0", None)
    assert [event.loss for event in events(run_config, Step)] == [event.loss for event in events(undisturbed, Step)]
    assert files_of(run_config, 12) == files_of(undisturbed, 12)


def test_a_step_that_is_bad_twice_is_passed_over(run_config):
    trainer = Trainer(run_config)
    parameter = trainer.engine.model.blocks[0].mlp.up_proj.weight
    calls = []

    def poison_third_step(gradient):
        calls.append(None)
        return gradient * float("nan") if len(calls) in (5, 7) else gradient  # two micro-batches a step

    parameter.register_hook(poison_third_step)
    assert trainer.train() == "finished"
    assert [event.step for event in events(run_config, Retried)] == [3]
    assert [event.step for event in events(run_config, Skipped)] == [3]
    assert [event.step for event in events(run_config, Step)] == [1, 2, *range(4, 13)]


@pytest.fixture
def small_disk(tmp_path):
    """A real file system with room for one checkpoint and a half."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", folder], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a small file system here: {mount.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_a_full_disk_is_reported_and_training_goes_on(run_config, small_disk):
    assert Trainer(run_config).train() == "not_saved"  # the last state is lost, and the caller is told
    assert [event.step for event in events(run_config, Step)] == list(range(1, 13))
    assert [event.step for event in events(run_config, Saved)] == [4]
    assert [event.step for event in events(run_config, SaveFailed)] == [8, 12]
    assert "No space left" in events(run_config, SaveFailed)[0].reason
    checkpoint, problems = CheckpointFolder(small_disk / "checkpoints").newest_complete()
    assert (checkpoint.manifest.step, problems) == (4, [])
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs tmpfs")
def test_an_event_log_without_room_does_not_stop_the_run(run_config, small_disk, capsys):
    trainer = Trainer(replace(run_config, checkpoint=CheckpointConfig(interval=100)))
    with (small_disk / "ballast").open("ab", buffering=0) as ballast:
        with contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(4096))
        ballast.truncate(ballast.tell() - 2 * 4096)  # a page for the settings, and one for the first events
    assert trainer.train() == "not_saved"
    assert trainer.finished_steps == 12
    assert "event log: [Errno 28]" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends_with_zero(run_config, number, tmp_path):
    config = with_steps(run_config, 100_000)
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    process = WarmProcess("thinpipe", "train", file, stdout=subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("step:     10"):
            process.send_signal(number)
            break
    rest, _ = process.communicate(timeout=600)
    assert process.returncode == 0, rest
    assert "saving after this step, then stopping; the same command goes on from there" in rest
    assert "stopped and saved" in rest
    checkpoint, problems = CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete()
    assert problems == []
    assert checkpoint.manifest.step == events(config, Step)[-1].step == events(config, Stopped)[-1].step


def test_another_model_in_the_folder_is_refused(run_config):
    Trainer(with_steps(run_config, 4)).train()
    other = replace(run_config, model=replace(run_config.model, hidden_dim=96))
    with pytest.raises(UserError, match=r"hidden_dim is 96 in the settings and 64 there.*dump_folder"):
        Trainer(other).train()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": OptimizerConfig(second_moment="element")}, r"another optimizer.second_moment than 'element'"),
        ({"training": {"precision": "bf16"}}, r"training.precision fp32 or bf16-mixed, and this run has bf16"),
        ({"training": {"seq_len": 8}}, r"training.seq_len has changed .*step-00000004 was saved \(16 -> 8\)"),
        ({"debug": {"seed": 1}}, r"debug.seed has changed .*step-00000004 was saved \(0 -> 1\)"),
    ],
)
def test_resuming_with_settings_that_do_not_fit_is_refused(run_config, change, message):
    Trainer(with_steps(run_config, 4)).train()
    for section, value in change.items():
        fields = value if isinstance(value, dict) else None
        run_config = replace(
            run_config, **{section: replace(getattr(run_config, section), **fields) if fields else value}
        )
    with pytest.raises(UserError, match=message):
        Trainer(run_config).train()


def test_changed_settings_that_change_numbers_are_listed(run_config):
    Trainer(with_steps(run_config, 4)).train()
    changed = replace(run_config, optimizer=OptimizerConfig(lr=2e-3), metrics=replace(run_config.metrics, log_freq=7))
    Trainer(replace(changed, checkpoint=replace(run_config.checkpoint, interval=7))).train()
    assert events(run_config, Started)[-1].changed == ["training.steps 4 -> 12", "optimizer.lr 0.001 -> 0.002"]


def test_a_basis_may_begin_to_move_later(run_config):
    Trainer(with_steps(replace(run_config, basis=BasisConfig(interval=0)), 4)).train()
    Trainer(run_config).train()
    assert [event.step for event in events(run_config, BasisChanged)] == [5, 10]


def test_other_tokens_are_refused(run_config, tokens, tmp_path):
    Trainer(with_steps(run_config, 4)).train()
    shutil.copytree(tokens / "validation", tmp_path / "other" / "train")
    with pytest.raises(UserError, match="trained on other tokens"):
        Trainer(replace(run_config, data=DataConfig(path=tmp_path / "other"))).train()


def test_validation_does_not_depend_on_the_microbatch_size(run_config):
    losses = []
    for size in (8, 2):
        parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=size)
        trainer = Trainer(replace(in_folder(run_config, f"val-{size}"), parallelism=parallelism))
        losses.append(validate(trainer.engine, trainer.batch_loader, 0))
    assert losses[0].tokens == losses[1].tokens == 2 * 8 * 16
    assert losses[0].loss == pytest.approx(losses[1].loss, rel=1e-6)


def test_too_long_sequences_are_refused(run_config):
    with pytest.raises(UserError, match=r"seq_len 64 is above the model's max_seq_len 32"):
        Trainer(replace(run_config, training=replace(run_config.training, seq_len=64)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ModelSettings(), "boundary": BoundaryConfig(forward="int8")}, "model.boundaries is empty"),
        ({"link": LinkConfig(up="80mbps")}, "there is one process"),
        ({"model": ModelSettings(), "optimizer": OptimizerConfig(second_moment="element")}, "for subspace models"),
    ],
)
def test_a_setting_without_effect_is_refused(run_config, changes, message):
    with pytest.raises(UserError, match=message):
        Trainer(replace(run_config, **changes))


def test_pairs_that_cannot_work_are_refused_at_once(run_config):
    zero_bubble = ParallelismConfig(pipeline_parallel_schedule="ZBVZeroBubble")
    with pytest.raises(UserError, match=r"set execution.compile = false"):
        replace(run_config, parallelism=zero_bubble, execution=ExecutionConfig(compile=True))
    with pytest.raises(UserError, match=r"cannot split that of a boundary projection's tables"):
        replace(
            run_config,
            parallelism=zero_bubble,
            model=ModelSettings(boundaries=(1,), projection=ProjectionConfig(width=8)),
        )


@pytest.mark.parametrize("number_format", ["bf16", "int8", "int4"])
def test_lossy_messages_train_too(run_config, number_format):
    config = replace(with_steps(run_config, 40), boundary=BoundaryConfig(forward=number_format, backward=number_format))
    assert Trainer(config).train() == "finished"
    losses = [event.loss for event in events(config, Step)]
    assert losses[-1] < losses[0] - 0.1


def test_settings_saved_with_the_run_load_to_the_same(run_config):
    Trainer(with_steps(run_config, 4)).train()
    assert load_toml(run_config.job.dump_folder / "run.toml", RunConfig) == with_steps(run_config, 4)


def test_a_fixed_basis_never_moves(run_config):
    config = replace(run_config, basis=BasisConfig(interval=0))
    trainer = Trainer(config)
    first = trainer.engine.model.space.basis.hash
    trainer.train()
    assert trainer.engine.model.space.basis.hash == first
    assert events(config, BasisChanged) == []
