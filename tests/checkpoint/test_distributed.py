"""Processes with folders of their own come to one outcome: the same checkpoint, or the same error."""

import pytest

from tests.checkpoint.test_storage import layers, manifest
from tests.transport.processes import results, start
from thinpipe.checkpoint import CheckpointFolder


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
    return "process 0 has no whole checkpoint in its folder, others have one of step 20"


def one_cannot_be_read(tmp_path):
    manifest_path = save(tmp_path, 0, 20) / "step-00000020" / "manifest.json"
    manifest_path.unlink()
    manifest_path.mkdir()
    save(tmp_path, 1, 20)
    return "process 0 cannot read its checkpoints: [Errno 21] Is a directory"


def other_runs(tmp_path):
    save(tmp_path, 0, 20)
    save(tmp_path, 1, 20, value=7)
    return "they come from different runs"


@pytest.mark.parametrize("prepare", [only_one_has_a_step, one_cannot_be_read, other_runs])
def test_all_raise_what_one_cannot_do(tmp_path, prepare):
    text = prepare(tmp_path)
    found, leaders = outcomes_of(tmp_path)
    assert all(outcome.startswith("UserError: ") and text in outcome for outcome in found), found
    assert leaders == [True, True], "the processes are still in step after the error"


def test_no_leader_where_one_process_cannot_write(tmp_path):
    (tmp_path / "1").write_text("a file where the folder of process 1 should be")
    found, leaders = outcomes_of(tmp_path)
    assert found == [[None, []]] * 2
    assert all(outcome.startswith("UserError: checkpoints cannot be saved: process 1: ") for outcome in leaders), (
        leaders
    )
    assert list((tmp_path / "0").iterdir()) == [], "no marker stays"
