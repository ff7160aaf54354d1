"""What a hub has of its run: which peers have the same, and how checkpoints come together from several of them."""

import io
from dataclasses import replace

import msgspec
import pytest
import torch
from rich.console import Console

from thinpipe.checkpoint import restore
from thinpipe.checkpoint.folder import step_folder
from thinpipe.core.digest import text_sha256
from thinpipe.core.errors import UserError
from thinpipe.models.model import make_space
from thinpipe.subspace.basis import Basis
from thinpipe.swarm.messages import Verdict
from thinpipe.train import hosting
from thinpipe.train.console import Lines
from thinpipe.train.hosting import HostedRun
from thinpipe.train.tokens import tokenizer_sha256

NAMES = ["a", "b"]


@pytest.fixture
def hosted(run_config):
    run = HostedRun(run_config, Lines(Console(file=io.StringIO()), log_freq=1))
    yield run
    run.close()


def hashes_at_a_peer(hosted, beginning, space=None):
    if space is None:
        space = make_space(hosted.model)
        restore(hosted.newest, {}, space)
    return {"settings": text_sha256(beginning.settings), "tokenizer": tokenizer_sha256({})} | space.hashes


def flipped_bit(matrix_DK):
    changed = matrix_DK.clone()
    changed.view(torch.int32)[3, 1] ^= 1
    return changed


def rotated(matrix_DK):
    """The same subspace, and all norms as they were."""
    width = matrix_DK.shape[1]
    return matrix_DK @ torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(0)))[0]


@pytest.mark.parametrize("change", [flipped_bit, torch.neg, rotated])
def test_a_peer_with_another_basis_is_told_both(hosted, change):
    beginning = hosted.begin([1, 2])
    good = hashes_at_a_peer(hosted, beginning)
    assert hosted.compare(good) == ""
    bad = good | {"basis": Basis(change(make_space(hosted.model).basis.matrix_DK)).hash}
    assert hosted.compare(bad) == f"basis is {bad['basis']} there and {good['basis']} at the hub: it must be the same"


def test_a_peer_with_another_table_tokenizer_or_settings_is_told_both(hosted, tmp_path):
    beginning = hosted.begin([1, 2])
    good = hashes_at_a_peer(hosted, beginning)
    subspace = hosted.model.subspace
    seeded = replace(hosted.model, subspace=replace(subspace, seed=subspace.seed + 1))
    (tmp_path / "tokenizer.json").write_text("{}")
    others = {
        "token table": make_space(seeded).hashes["token table"],
        "tokenizer": tokenizer_sha256({"tokenizer/tokenizer.json": tmp_path / "tokenizer.json"}),
        "settings": text_sha256(beginning.settings.replace("seq_len = 16", "seq_len = 8")),
    }
    for field, there in others.items():
        assert there != good[field]
        expected = f"{field} is {there} there and {good[field]} at the hub: it must be the same"
        assert hosted.compare(good | {field: there}) == expected
    without = {field: value for field, value in good.items() if field != "basis"}
    assert hosted.compare(without).startswith("basis is none there and ")
    assert hosted.compare(good | {"more": "1"}) == "more is 1 there and none at the hub: it must be the same"


def manifest_of(hosted, step):
    return msgspec.json.encode(msgspec.structs.replace(hosted.newest.manifest, step=step).sealed())


def arrive(hosted, step, names):
    """Files of the first checkpoint as those of a later step, of which we only want to see how they arrive."""
    for name in names:
        accepted = hosted.accept("a", f"{step_folder(step)}/{name}")
        accepted.target.write_bytes((hosted.checkpoints.folder / "step-00000000" / name).read_bytes())
        hosted.kept("a", f"{step_folder(step)}/{name}")


def test_a_slow_line_gets_its_checkpoint_through_before_a_newer_one_begins(hosted):
    hosted.begin([1, 2])
    first, *rest = hosted.newest.manifest.files
    assert hosted.saved("a", NAMES, manifest_of(hosted, 4)) == Verdict()
    assert hosted.saved("b", NAMES, manifest_of(hosted, 4)) == Verdict()
    arrive(hosted, 4, [first])
    assert hosted.saved("a", NAMES, manifest_of(hosted, 8)) == Verdict(later=True)
    arrive(hosted, 4, rest)
    assert hosted.newest.manifest.step == 4
    assert hosted.saved("a", NAMES, manifest_of(hosted, 8)) == Verdict()


def test_a_checkpoint_that_somebody_has_skipped_gives_way(hosted):
    hosted.begin([1, 2])
    hosted.saved("a", NAMES, manifest_of(hosted, 4))
    assert hosted.saved("b", NAMES, manifest_of(hosted, 8)) == Verdict(), "b will never send step 4"
    assert "another checkpoint of step 8" in hosted.saved("a", NAMES, manifest_of(hosted, 4)).refusal


def test_a_checkpoint_of_which_nothing_comes_gives_way(hosted, monkeypatch):
    hosted.begin([1, 2])
    hosted.saved("a", NAMES, manifest_of(hosted, 4))
    monkeypatch.setattr(hosting, "_QUIET_SECONDS", 0.0)
    assert hosted.saved("a", NAMES, manifest_of(hosted, 8)) == Verdict()


def test_a_file_of_an_older_checkpoint_does_not_count_for_a_newer_one(hosted):
    """Its last piece may have been written while the newer one began."""
    hosted.begin([1, 2])
    hosted.saved("a", NAMES, manifest_of(hosted, 4))
    hosted.saved("b", NAMES, manifest_of(hosted, 8))
    hosted.saved("a", NAMES, manifest_of(hosted, 8))
    for name in hosted.newest.manifest.files:
        hosted.kept("a", f"step-00000004/{name}")
    assert hosted.newest.manifest.step == 0


def test_a_step_beyond_the_run_is_refused(hosted):
    hosted.begin([1, 2])
    assert hosted.saved("a", NAMES, manifest_of(hosted, 13)).refusal == "there is no step 13 in this run"


def test_a_batch_that_no_message_can_hold_is_refused(run_config):
    config = replace(run_config, training=replace(run_config.training, global_batch_size=1 << 20, seq_len=16))
    with pytest.raises(UserError, match=r"ids of a batch take 35651584 bytes.*lower training\.global_batch_size"):
        HostedRun(config, Lines(Console(file=io.StringIO()), log_freq=1))
