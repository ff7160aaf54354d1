"""What a hub computes again from checkpoints of a Hugging Face model: losses to the bit, and sketches of its layers."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.huggingface.run_files import run_of
from tests.programs import steps_of
from tests.swarm.hub.test_loss_audit import until
from thinpipe.checkpoint import Checkpoint, CheckpointFolder
from thinpipe.core.errors import UserError
from thinpipe.core.run_folder import checkpoints_path
from thinpipe.swarm.hub.first_checkpoint import make_first_checkpoint
from thinpipe.swarm.hub.layer_changes import LayerChanges
from thinpipe.swarm.hub.loss_audit import LossAudit
from thinpipe.swarm.hub.run_model import open_base
from thinpipe.training.data_loading import LocalTokens
from thinpipe.training.recomputed_loss import recompute_losses
from thinpipe.training.trainer import Trainer


@pytest.mark.parametrize("way", ["LoRA", "full", "nf4"])
def test_losses_are_those_of_the_next_steps(way, base_of, tune_tokens, tmp_path):
    """Of a tied model with dropout; from the first checkpoint too, which has the base by its hash alone."""
    config = run_of(base_of("gpt2"), tune_tokens, tmp_path / "run", way)
    source = LocalTokens(config)
    base = open_base(config, source.dataset_info.vocab_size, None)
    folder = CheckpointFolder(checkpoints_path(config.job.dump_folder))
    first = make_first_checkpoint(config, source.dataset_info, folder, base)
    assert sum(entry.nbytes for entry in first.manifest.files.values()) < 1000
    Trainer(config).train()
    losses = {event.step: event.loss for event in steps_of(config)}
    later = Checkpoint.open(folder.folder / "step-00000002")
    assert first.manifest.model["base_sha256"] == later.manifest.model["base_sha256"]
    found = {step: recompute_losses(each, source) for step, each in ((0, first), (2, later))}
    assert [found[step].next_step for step in found] == [losses[1], losses[3]]
    trained = {file.removesuffix(".safetensors") for file in later.manifest.files} - {"run"}
    assert found[2].sketches.keys() == trained
    assert "first" not in trained or way == "full"
    changes = LayerChanges()
    changes.on_generation({**dict.fromkeys(["first", "last"], "frozen"), **dict.fromkeys(trained, "trains")})
    assert changes.on_commit(0, found[0].sketches) is None
    assert changes.on_commit(2, found[2].sketches) is None, "nobody is accused of not training what is frozen"
    lazy = found[2].sketches | {"blocks.3": found[0].sketches["blocks.3"]}
    changes.on_generation(dict.fromkeys(trained, "lazy"))
    assert changes.on_commit(0, found[0].sketches) is None
    assert changes.on_commit(2, lazy).layers == ["blocks.3"]


@pytest.mark.long
def test_the_audit_of_a_hub_confirms_a_loss_and_says_when_it_cannot(base_of, tune_tokens, tmp_path):
    """In its own process; with a base that is gone it is no alarm, and the reason is in `thinpipe status`."""
    own = change(base_of("qwen3"), tmp_path / "own", "model.norm.weight")
    config = run_of(own, tune_tokens, tmp_path / "run")
    Trainer(config).train()
    audit = LossAudit(tmp_path / "audit", share=1.0, band=1e-3)
    commit = Checkpoint.open(checkpoints_path(config.job.dump_folder) / "step-00000002")
    audit.on_commit(commit)
    for event in steps_of(config):
        audit.on_step(event)
    recomputed, *_ = until(audit.poll)
    assert (recomputed.step, recomputed.reported) == (3, recomputed.recomputed)
    shutil.rmtree(own)
    audit._last_measured = -1
    audit.on_commit(commit)
    until(lambda: audit.poll() == [] and not audit._commit_losses.is_running)
    assert audit.summary.startswith("FAILED: the loss of step 3 could not be computed again")
    assert str(own) in audit.summary
    audit.close()


def test_another_base_is_refused(base_of, tune_tokens, tmp_path):
    changed = change(base_of("qwen3"), tmp_path / "changed", "model.layers.5.mlp.up_proj.weight")
    config = run_of(changed, tune_tokens, tmp_path / "run")
    Trainer(config).train()
    checkpoint = Checkpoint.open(checkpoints_path(config.job.dump_folder) / "step-00000002")
    change(changed, changed, "model.layers.5.mlp.up_proj.weight")
    with pytest.raises(UserError, match=f"was trained on another base than {changed}"):
        recompute_losses(checkpoint, LocalTokens(config))


def change(base, folder, name):
    """A copy of a base, or itself, with one other number in a tensor."""
    folder.mkdir(exist_ok=True)
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            if folder != base:
                (folder / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        if name in tensors:
            tensors[name].view(-1)[7] += 0.25
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder
