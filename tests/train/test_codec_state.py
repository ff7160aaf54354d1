"""What boundaries remember survives a stop: bit for bit, in one process and when the segments are placed anew."""

import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.programs import files_of
from tests.reference.language import SyntheticLanguage
from tests.run_fixtures import VOCABULARY
from tests.train.test_processes import finish, placed, start
from tests.train.test_trainer import assert_same_checkpoint, events, in_folder, with_steps
from thinpipe.checkpoint import CheckpointFolder
from thinpipe.checkpoint.distributed import Saver
from thinpipe.config.boundary import BoundaryConfig, CompressionConfig
from thinpipe.config.run import CheckpointConfig, DataConfig, ParallelismConfig
from thinpipe.core.errors import UserError
from thinpipe.core.events import SaveFailed, Skipped, Started, Step, Validated
from thinpipe.data import ShardWriter
from thinpipe.training.trainer import Trainer

EF21 = BoundaryConfig(
    states=CompressionConfig(kind="topk", keep=0.3, feedback="ef21"),
    gradients=CompressionConfig(kind="quantise", bits=4, feedback="ef"),
)
AQSGD = BoundaryConfig(states=CompressionConfig(kind="quantise", bits=2, feedback="aqsgd"))


@pytest.fixture
def few_samples(run_config, tmp_path):
    """Two batches a generation, so that every sample comes back five times; and a checkpoint after every step."""
    folder = tmp_path / "few"
    ids = SyntheticLanguage(64, seed=1).batch(0, 1, 16 * 16)[0].numpy()
    for side in ("train", "validation"):
        with ShardWriter(folder / side, VOCABULARY, source="synthetic", max_shard_tokens=1_000_000) as writer:
            writer.add(ids.astype(np.uint32), text_nbytes=(len(ids) + 1) * 3)
            writer.finish()
    checkpoint = CheckpointConfig(interval=1, keep_latest_k=0)
    return replace(run_config, data=DataConfig(path=folder), checkpoint=checkpoint)


@pytest.mark.parametrize("boundary", [EF21, AQSGD, "AQSGD on disk"], ids=["ef21", "aqsgd", "aqsgd-disk"])
def test_resume_is_bit_for_bit_the_uninterrupted_run(few_samples, boundary, tmp_path):
    """Through validations, whose samples AQ-SGD knows here, and changes of basis."""
    settings = replace(AQSGD, store=tmp_path / "store") if boundary == "AQSGD on disk" else boundary
    config = replace(few_samples, boundary=settings)
    Trainer(config).train()
    whole, _ = CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete()
    ends = {f"boundary.{index}.{end}.safetensors" for index in (0, 1) for end in ("sender", "receiver")}
    assert {name for name in whole.manifest.files if name.startswith("boundary")} == ends
    if boundary != EF21:
        assert whole.layer("boundary.1.sender")["states.rows"].shape == (16, 16 * 4)
    losses = [event.loss for event in events(config, Step)]
    for stop in (1, 5, 8):
        resumed = in_folder(config, f"resumed-{stop}")
        target = resumed.job.dump_folder / "checkpoints"
        target.mkdir(parents=True)
        os.rename(whole.path.parent / f"step-{stop:08d}", target / f"step-{stop:08d}")
        Trainer(resumed).train()
        again, _ = CheckpointFolder(target).newest_complete()
        assert_same_checkpoint(whole, again)
        assert [event.loss for event in events(resumed, Step)] == losses[stop:]


@pytest.mark.parametrize(("boundary", "name"), [(EF21, "states.copy_BTW"), (AQSGD, "states.rows")], ids=["ef", "aq"])
def test_a_copy_that_drifts_from_the_other_end_is_found_when_saving(few_samples, boundary, name, monkeypatch):
    """One bit of one number of what the receiver keeps, as on a device that decodes differently."""
    config = replace(few_samples, boundary=boundary)
    save = Saver.save

    def save_after_a_changed_bit(saver, manifest, layers):
        if manifest.step == 3:
            layers["boundary.1.receiver"][name] = drifted = layers["boundary.1.receiver"][name].clone()
            drifted.view(torch.int32)[0, 0] ^= 1
        return save(saver, manifest, layers)

    monkeypatch.setattr(Saver, "save", save_after_a_changed_bit)
    with pytest.raises(UserError, match=f"the two ends of boundary.1 no longer have the same {name} at step 3"):
        Trainer(config).train()
    monkeypatch.undo()
    newest, _ = CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete()
    assert newest.manifest.step == 2
    Trainer(config).train()
    assert CheckpointFolder(config.job.dump_folder / "checkpoints").newest_complete()[0].manifest.step > 3


def test_a_memory_does_not_know_how_many_processes_keep_it(few_samples):
    """Saved from three processes, resumed in one and in two: bit for bit the run of one process."""
    both = replace(AQSGD, gradients=EF21.gradients)
    config = replace(
        few_samples,
        boundary=both,
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
        checkpoint=CheckpointConfig(interval=4, keep_latest_k=0),
    )
    alone = placed(config, 1, "alone")
    Trainer(alone).train()
    three = placed(config, 3, "three")
    code, printed = finish(start(three))
    assert code == 0, printed
    assert [files_of(three, step) for step in (4, 12)] == [files_of(alone, step) for step in (4, 12)]
    one, two = placed(config, 1, "one"), placed(config, 2, "two")
    source = three.job.dump_folder / "checkpoints" / "step-00000004"
    for resumed in (one, two):
        shutil.copytree(source, resumed.job.dump_folder / "checkpoints" / source.name)
    Trainer(one).train()
    code, printed = finish(start(two))
    assert code == 0, printed
    assert files_of(one, 12) == files_of(two, 12) == files_of(alone, 12)


def test_states_may_cross_whole_in_validation_between_processes(run_config):
    whole = replace(run_config, boundary=replace(EF21, at_inference=False))
    alone, two = placed(whole, 1, "alone"), placed(whole, 2, "two")
    compressed = placed(replace(run_config, boundary=EF21), 1, "compressed")
    for config in (alone, compressed):
        Trainer(config).train()
    code, printed = finish(start(two))
    assert code == 0, printed
    assert files_of(two, 12) == files_of(alone, 12)
    losses = [[event.loss for event in events(config, Validated)] for config in (alone, two, compressed)]
    assert losses[0] == losses[1] != losses[2]


def test_validation_does_not_change_the_run(run_config):
    weights = []
    for freq in (0, 2):
        validation = replace(run_config.validation, freq=freq)
        config = replace(in_folder(run_config, f"validated-{freq}"), boundary=EF21, validation=validation)
        Trainer(config).train()
        weights.append(files_of(config, 12))
    assert weights[0] == weights[1]


def test_a_bad_step_leaves_no_nan_in_a_memory(run_config):
    trainer = Trainer(replace(run_config, boundary=EF21))
    norm, calls = trainer.engine.model.blocks[0].input_layernorm, []

    def poison_third_step(_module, _inputs, output):
        calls.append(None)
        return output * float("nan") if len(calls) in (5, 7) else output  # two micro-batches a step, and tried again

    norm.register_forward_hook(poison_third_step)
    assert trainer.train() == "finished"
    assert [event.step for event in events(trainer.config, Skipped)] == [3]
    for method in trainer.engine.methods:
        for tensor in (*method.sender_state().values(), *method.receiver_state().values()):
            assert tensor.isfinite().all()


def test_a_checkpoint_without_the_memory_is_refused_not_passed_over(run_config):
    Trainer(with_steps(run_config, 4)).train()
    with pytest.raises(UserError, match=r"no boundary.0.sender: .* whose boundary codecs have no state"):
        Trainer(replace(run_config, boundary=EF21)).train()


def test_a_memory_of_other_microbatches_is_refused(run_config):
    Trainer(with_steps(replace(run_config, boundary=EF21), 4)).train()
    parallelism = ParallelismConfig(pipeline_parallel_microbatch_size=2)
    with pytest.raises(UserError, match=r"boundary.0.sender: .*\(4, 16, 4\).*\(2, 16, 4\).*micro-batches"):
        Trainer(replace(run_config, boundary=EF21, parallelism=parallelism)).train()


def test_a_run_may_go_on_without_its_memory_or_begin_from_its_weights(run_config):
    Trainer(with_steps(replace(run_config, boundary=EF21), 4)).train()
    started = Trainer(
        replace(in_folder(run_config, "second"), model=type(run_config.model)(initial=run_config.job.dump_folder))
    )
    assert started.train() == "finished"
    Trainer(run_config).train()
    assert "boundary.states.feedback ef21 -> none" in events(run_config, Started)[-1].changed


def test_a_damaged_memory_is_passed_over(run_config):
    config = replace(run_config, boundary=EF21)
    Trainer(with_steps(config, 8)).train()
    file = config.job.dump_folder / "checkpoints" / "step-00000008" / "boundary.1.receiver.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    Trainer(config).train()
    assert events(config, Started)[-1].step == 4
    assert "boundary.1.receiver.safetensors has changed" in events(config, SaveFailed)[0].reason


@pytest.mark.parametrize("feedback", ["none", "ef", "ef21", "aqsgd"])
@pytest.mark.parametrize("kind", ["topk", "quantise", "lowrank"])
def test_every_pair_learns(few_samples, kind, feedback):
    size = {"topk": {"keep": 0.5}, "quantise": {"bits": 4}, "lowrank": {"rank": 2}}[kind]
    states = CompressionConfig(kind=kind, feedback=feedback, **size)
    gradients = replace(states, feedback="none") if feedback == "aqsgd" else states
    config = replace(
        with_steps(few_samples, 30),
        boundary=BoundaryConfig(states=states, gradients=gradients),
        checkpoint=CheckpointConfig(interval=100),
    )
    assert Trainer(config).train() == "finished"
    losses = [event.loss for event in events(config, Step)]
    assert torch.tensor(losses[-4:]).mean() < losses[0] - 0.1
