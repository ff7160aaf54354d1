"""Processes with folders of their own come to one outcome: the same checkpoint, or an error in all of them."""

import errno

import pytest

from tests.checkpoint.test_storage import layers, manifest
from tests.transport.processes import results, start
from thinpipe.checkpoint import CheckpointFolder
from thinpipe.checkpoint.storage import FileEntry


def save(tmp_path, rank, *steps, value=None):
    folder = CheckpointFolder(tmp_path / str(rank) / "checkpoints")
    for step in steps:
        folder.save(manifest(step), layers(step if value is None else value))
    return folder.folder


def damage(folder, step):
    (folder / f"step-{step:08d}" / "last.safetensors").write_bytes(b"")


def outcomes_of(tmp_path, count=2):
    """What each process found: the agreed step with the problems, or an error; and whether the process leads."""
    found = results(start(count, "tests.checkpoint.common_checkpoint", tmp_path))
    return [checkpoint for checkpoint, _ in found], [leads for _, leads in found]


def test_the_newest_step_that_is_whole_everywhere(tmp_path):
    damage(save(tmp_path, 0, 10, 20, 30, 40), 30)
    save(tmp_path, 1, 10, 20, 30)
    (first, second), leaders = outcomes_of(tmp_path)
    assert first[0] == second[0] == 20
    assert [text for text in first[1] if "not every process has step 40" in text]
    assert [text for text in first[1] if "step-00000030/last.safetensors is missing or cut short" in text]
    assert second[1] == ["not every process has step 30"]
    assert leaders == [True, True], "each process leads in a folder of its own"


def only_one_has_a_step(tmp_path):
    damage(save(tmp_path, 0, 20, 40), 20)
    save(tmp_path, 1, 20)
    return None, "process 0 has no whole checkpoint in its folder, others have one of step 20"


def a_manifest_is_unreadable(tmp_path):
    manifest_path = save(tmp_path, 0, 20) / "step-00000020" / "manifest.json"
    manifest_path.unlink()
    manifest_path.mkdir()
    save(tmp_path, 1, 20)
    return None, f"process 0: {manifest_path} cannot be read: [Errno 21] Is a directory"


def a_layer_is_unreadable(tmp_path):
    folder = CheckpointFolder(tmp_path / "0" / "checkpoints")
    folder.begin(20)
    files = folder.write(20, layers(20))
    path = folder.commit(manifest(20), files | {"last.safetensors": FileEntry(nbytes=0, sha256="")}).path
    (path / "last.safetensors").unlink()
    (path / "last.safetensors").symlink_to("/proc/self/mem")  # of 0 bytes, and reading it fails with EIO
    save(tmp_path, 1, 20)
    return errno.EIO, "process 0 cannot read its checkpoints: [Errno 5] Input/output error"


@pytest.mark.parametrize("prepare", [only_one_has_a_step, a_manifest_is_unreadable, a_layer_is_unreadable])
def test_the_process_with_a_problem_raises_it_and_the_others_name_that_process(tmp_path, prepare):
    number, text = prepare(tmp_path)
    (own, other), leaders = outcomes_of(tmp_path)
    assert (own["kind"], own["errno"]) == ("UserError", number)
    assert (other["kind"], other["errno"]) == ("OtherProcessError", None)
    assert text in own["text"]
    assert text in other["text"]
    assert leaders == [True, True], "the processes are still in step after the error"


def test_checkpoints_of_other_runs_are_an_error_of_every_process(tmp_path):
    save(tmp_path, 0, 20)
    save(tmp_path, 1, 20, value=7)
    found, leaders = outcomes_of(tmp_path)
    assert [outcome["kind"] for outcome in found] == ["UserError"] * 2
    assert all("they come from different runs" in outcome["text"] for outcome in found), found
    assert leaders == [True, True], "the processes are still in step after the error"


def test_no_leader_where_one_process_cannot_write(tmp_path):
    (tmp_path / "1").write_text("a file where the folder of process 1 should be")
    found, (other, own) = outcomes_of(tmp_path)
    assert found == [[None, []]] * 2
    assert (own["kind"], own["errno"]) == ("UserError", errno.EEXIST)
    assert own["text"].startswith("checkpoints cannot be saved: [Errno 17] ")
    assert other["kind"] == "OtherProcessError"
    assert other["text"].startswith("checkpoints cannot be saved: process 1: [Errno 17] ")
    assert list((tmp_path / "0").iterdir()) == [], "no marker stays"
