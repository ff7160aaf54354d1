"""What a hub has of its run: which peers have the same, and how checkpoints come together from several of them."""

import io
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console

from thinpipe.checkpoint import restore
from thinpipe.checkpoint.folder import MANIFEST, step_folder
from thinpipe.core.digest import text_sha256
from thinpipe.core.errors import UserError
from thinpipe.core.events import Stopped
from thinpipe.models.model import make_space
from thinpipe.subspace.basis import Basis
from thinpipe.swarm import commits
from thinpipe.swarm.assign import Assignment
from thinpipe.swarm.commit_history import Commit
from thinpipe.swarm.commit_log import COMMITS
from thinpipe.swarm.messages import Verdict
from thinpipe.swarm.roster import Epoch
from thinpipe.train.console import Lines
from thinpipe.train.hosting import HostedRun
from thinpipe.train.tokens import tokenizer_sha256


def begin(hosted, number=1):
    assignment = Assignment(
        places=(("a", range(1)), ("b", range(1, 3))),
        spares=(),
        too_small=(),
        loads=(),
        tokens_per_second=1.0,
        bottleneck="",
    )
    return hosted.begin(Epoch(number, assignment, {"a": 1, "b": 1}))


def host(config):
    return HostedRun(config, Lines(Console(file=io.StringIO()), log_freq=1))


@pytest.fixture
def hosted(run_config):
    run = host(run_config)
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
    beginning = begin(hosted)
    good = hashes_at_a_peer(hosted, beginning)
    assert hosted.compare(good) == ""
    bad = good | {"basis": Basis(change(make_space(hosted.model).basis.matrix_DK)).hash}
    assert hosted.compare(bad) == f"basis is {bad['basis']} there and {good['basis']} at the hub: it must be the same"


def test_a_peer_with_another_table_tokenizer_or_settings_is_told_both(hosted, tmp_path):
    beginning = begin(hosted)
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


def manifest_of(hosted, step, **changes):
    return msgspec.json.encode(msgspec.structs.replace(hosted.newest.manifest, step=step, **changes).sealed())


def tell(hosted, peer, epoch, manifest):
    """All have all."""
    return hosted.saved(peer, epoch, manifest, list(hosted.newest.manifest.files))


def logged(config):
    lines = (config.job.dump_folder / COMMITS).read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Commit) for line in lines]


def arrive(hosted, step, names):
    """Files of the first checkpoint as those of a later step, of which we only want to see how they arrive."""
    for name in names:
        accepted = hosted.accept("a", f"{step_folder(step)}/{name}")
        accepted.target.write_bytes((hosted.checkpoints.folder / "step-00000000" / name).read_bytes())
        hosted.kept("a", f"{step_folder(step)}/{name}")


def test_a_slow_line_gets_its_checkpoint_through_before_a_newer_one_begins(hosted):
    begin(hosted)
    first, *rest = hosted.newest.manifest.files
    assert tell(hosted, "a", 1, manifest_of(hosted, 4)) == Verdict()
    assert tell(hosted, "b", 1, manifest_of(hosted, 4)) == Verdict()
    arrive(hosted, 4, [first])
    assert tell(hosted, "a", 1, manifest_of(hosted, 8)) == Verdict(later=True)
    arrive(hosted, 4, rest)
    assert hosted.newest.manifest.step == 4
    assert tell(hosted, "a", 1, manifest_of(hosted, 8)) == Verdict()


def test_a_checkpoint_that_somebody_has_skipped_gives_way(hosted):
    begin(hosted)
    tell(hosted, "a", 1, manifest_of(hosted, 4))
    assert tell(hosted, "b", 1, manifest_of(hosted, 8)) == Verdict(), "b will never send step 4"
    assert "another checkpoint of step 8" in tell(hosted, "a", 1, manifest_of(hosted, 4)).refusal


def test_a_checkpoint_of_which_nothing_comes_gives_way(hosted, monkeypatch):
    begin(hosted)
    tell(hosted, "a", 1, manifest_of(hosted, 4))
    monkeypatch.setattr(commits, "QUIET_SECONDS", 0.0)
    assert tell(hosted, "a", 1, manifest_of(hosted, 8)) == Verdict()


def test_a_file_of_an_older_checkpoint_does_not_count_for_a_newer_one(hosted):
    """Its last piece may have been written while the newer one began."""
    begin(hosted)
    tell(hosted, "a", 1, manifest_of(hosted, 4))
    tell(hosted, "b", 1, manifest_of(hosted, 8))
    tell(hosted, "a", 1, manifest_of(hosted, 8))
    for name in hosted.newest.manifest.files:
        hosted.kept("a", f"step-00000004/{name}")
    assert hosted.newest.manifest.step == 0


def commit(hosted, step, epoch=1, **changes):
    for name in "ab":
        assert tell(hosted, name, epoch, manifest_of(hosted, step, **changes)) == Verdict()
    arrive(hosted, step, list(hosted.newest.manifest.files))
    assert hosted.committed == step


def test_every_commit_is_in_the_log_once_with_what_it_is_and_who_has_it(hosted, run_config):
    begin(hosted)
    commit(hosted, 4)
    assert tell(hosted, "b", 1, manifest_of(hosted, 4)) == Verdict(), "it is there"
    assert hosted.accept("b", "step-00000004/run.safetensors").target == hosted.newest.path / "run.safetensors"
    commit(hosted, 8)
    begin(hosted, 2)
    commit(hosted, 12, epoch=2)
    found = logged(run_config)
    assert [(each.step, each.epoch) for each in found] == [(4, 1), (8, 1), (12, 2)]
    for file, entry in hosted.newest.manifest.files.items():
        assert found[2].files[file] == entry.sha256
        assert found[2].holders[file] == ["a", "hub"]
    assert found[2].basis_sha256 == hosted.newest.manifest.basis_sha256


def test_what_is_committed_does_not_change(hosted):
    begin(hosted)
    commit(hosted, 4)
    other = msgspec.structs.replace(hosted.newest.manifest, samples_seen=77).sealed()
    assert "step 4 is committed with other contents" in (tell(hosted, "a", 1, msgspec.json.encode(other)).refusal)
    assert tell(hosted, "c", 1, manifest_of(hosted, 8)).refusal == "it is not of this epoch"
    begin(hosted, 2)
    assert tell(hosted, "a", 1, manifest_of(hosted, 8)).refusal == "it is not of this epoch"


def test_files_come_from_peers_that_have_told_that_they_have_them(hosted):
    begin(hosted)
    tell(hosted, "a", 1, manifest_of(hosted, 4))
    name = f"step-00000004/{next(iter(hosted.newest.manifest.files))}"
    assert [hosted.accept(peer, name) is not None for peer in "abc"] == [True, False, False]


def test_a_crash_before_a_line_of_the_log_is_mended_at_the_next_start(hosted, run_config):
    begin(hosted)
    commit(hosted, 4)
    commit(hosted, 8)
    hosted.close()
    path = run_config.job.dump_folder / COMMITS
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 20, whole.index(b"\n") + 1):
        path.write_bytes(whole[:cut])
        host(run_config).close()
        assert path.read_bytes() == whole


def test_a_checkpoint_that_the_hub_has_lost_is_taken_again_but_not_logged_again(hosted, run_config):
    begin(hosted)
    commit(hosted, 4)
    commit(hosted, 8)
    hosted.close()
    (hosted.newest.path / "run.safetensors").unlink()
    again = host(run_config)
    assert (again.committed, list(again.missing)) == (8, ["run.safetensors"])
    assert "held by a, who is away): going on from step 4" in again.fall_back(present=["b"], away=["a"])
    assert again.committed == 4
    begin(again, 2)
    commit(again, 8, epoch=2)
    again.close()
    assert [each.step for each in logged(run_config)] == [4, 8]
    assert again.news() == []


def lose_the_last_step_and_fall_back(config):
    """It was the last of the run."""
    hosted = host(config)
    begin(hosted)
    commit(hosted, 8)
    commit(hosted, 12)
    (hosted.newest.path / "run.safetensors").unlink()
    hosted.close()
    again = host(config)
    assert "going on from step 8" in again.fall_back(present=["b"], away=["a"])
    begin(again, 2)
    return again


def test_what_was_given_up_and_is_computed_otherwise_is_committed_and_the_run_ends(run_config):
    again = lose_the_last_step_and_fall_back(run_config)
    assert again.ended == ""
    commit(again, 12, epoch=2, samples_seen=77)
    assert again.ended.startswith("finished")
    (told,) = again.news()
    assert told.startswith("step 12 was committed before and its files were lost; computed again")
    again.close()
    first, lost, other = logged(run_config)
    assert [each.step for each in (first, lost, other)] == [8, 12, 12]
    assert (lost.replaces, other.replaces) == ("", lost.sha256)
    later = host(run_config)
    assert (later.committed, later.news()) == (12, [])
    later.close()


def test_a_crash_before_the_line_that_replaces_another_is_mended_too(run_config):
    again = lose_the_last_step_and_fall_back(run_config)
    commit(again, 12, epoch=2, samples_seen=77)
    again.close()
    path = run_config.job.dump_folder / COMMITS
    whole = path.read_bytes()
    path.write_bytes(whole[: whole[:-1].rindex(b"\n") + 1])
    later = host(run_config)
    assert len(later.news()) == 1
    later.close()
    assert path.read_bytes() == whole


def test_what_was_given_up_is_not_looked_for_again(run_config):
    lose_the_last_step_and_fall_back(run_config).close()
    later = host(run_config)
    assert (later.committed, later.missing, later.news()) == (8, {}, [])
    later.close()


@pytest.mark.parametrize("left", ["nothing", "files", "no folder at all"])
def test_a_commit_whose_folder_or_manifest_is_gone_is_asked_for(hosted, run_config, left, tmp_path):
    begin(hosted)
    commit(hosted, 4)
    commit(hosted, 8)
    hosted.close()
    shutil.copytree(hosted.newest.path, tmp_path / "peer")
    files = dict.fromkeys(hosted.newest.manifest.files)
    if left == "files":
        (hosted.newest.path / MANIFEST).write_text("{")
        files = {}
    else:
        shutil.rmtree(hosted.newest.path if left == "nothing" else hosted.checkpoints.folder)
    again = host(run_config)
    assert (again.committed, again.missing.keys()) == (8, files.keys())
    assert again.newest.manifest == hosted.newest.manifest
    assert f"put back from {run_config.job.dump_folder / 'newest.json'}" in again.news()[-1]
    for name in list(again.missing):
        shutil.copy(tmp_path / "peer" / name, again.accept("a", f"step-00000008/{name}").target)
        again.kept("a", f"step-00000008/{name}")
    begin(again, 2)
    assert tell(again, "a", 2, manifest_of(again, 8)) == Verdict(), "it is committed"
    again.checkpoints.open(8)
    again.close()
    assert [each.step for each in logged(run_config)] == [4, 8]


@pytest.mark.parametrize("damage", ["gone", "torn", "of a step that was not committed"])
def test_a_commit_of_which_nothing_is_left_is_missed_aloud(hosted, run_config, damage):
    begin(hosted)
    commit(hosted, 4)
    commit(hosted, 8)
    hosted.close()
    shutil.rmtree(hosted.newest.path)
    kept = run_config.job.dump_folder / "newest.json"
    if damage == "gone":
        kept.unlink()
    else:
        kept.write_bytes(kept.read_bytes()[:-9] if damage == "torn" else manifest_of(hosted, 12))
    again = host(run_config)
    assert again.committed == 4
    words = "step 8 is in commits.jsonl but its checkpoint is gone (held by a): going on from step 4"
    assert again.news() == [words]
    again.close()
    later = host(run_config)
    assert later.news() == [], "it was said"
    later.close()


def test_a_checkpoint_that_can_never_be_whole_is_not_taken(hosted):
    begin(hosted)
    first, *rest = hosted.newest.manifest.files
    hosted.saved("a", 1, manifest_of(hosted, 4), [first])
    hosted.saved("b", 1, manifest_of(hosted, 4), rest)
    assert hosted.accept("a", f"step-00000004/{first}") is not None
    hosted.gone("b")
    assert hosted.accept("a", f"step-00000004/{first}") is None
    assert hosted.saved("a", 1, manifest_of(hosted, 4), [first]).refusal == "b is gone, and its part with it"


def test_a_full_disk_leaves_the_newest_as_it_was(hosted):
    begin(hosted)
    commit(hosted, 4)
    log, good = hosted.commit_log, hosted.commit_log._file
    with Path("/dev/full").open("ab", buffering=0) as full:
        log._file = full
        for name in "ab":
            tell(hosted, name, 1, manifest_of(hosted, 8))
        arrive(hosted, 8, list(hosted.newest.manifest.files))
    log._file = good
    assert hosted.committed == 4
    assert "the hub cannot write" in hosted.display.console.file.getvalue()
    commit(hosted, 8)
    assert (log.history.last.step, log.history.sha256(4) != "") == (8, True)


@pytest.mark.parametrize("reason", ["signal", "not_saved", "finished"])
def test_a_run_has_ended_when_its_last_step_is_committed_and_not_when_an_epoch_ends(hosted, reason):
    begin(hosted)
    hosted.heard(Stopped(step=12, reason=reason))
    assert hosted.ended == ""
    commit(hosted, 12)
    assert hosted.ended.startswith("finished")


def test_a_step_beyond_the_run_is_refused(hosted):
    begin(hosted)
    assert tell(hosted, "a", 1, manifest_of(hosted, 13)).refusal == "there is no step 13 in this run"


def test_a_batch_that_no_message_can_hold_is_refused(run_config):
    config = replace(run_config, training=replace(run_config.training, global_batch_size=1 << 20, seq_len=16))
    with pytest.raises(UserError, match=r"ids of a batch take 35651584 bytes.*lower training\.global_batch_size"):
        HostedRun(config, Lines(Console(file=io.StringIO()), log_freq=1))
