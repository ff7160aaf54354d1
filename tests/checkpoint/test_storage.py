"""Checkpoints on disk: whole or absent, after kills, corruption and full disks."""

import random
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import torch

from thinpipe.checkpoint import Checkpoint, CheckpointFolder, Manifest
from thinpipe.core.bounds import LayerFileName
from thinpipe.core.errors import UserError


def manifest(step):
    return Manifest(
        step=step,
        samples_seen=step * 8,
        data_sha256="",
        run="",
        family="llama",
        model={},
        basis_version=None,
        basis_sha256=None,
        versions={"thinpipe": "0"},
    )


def layers(step, size=100):
    return {name: {"weight": torch.full((size,), float(step)), "step": torch.tensor(3.0)} for name in ("first", "last")}


def test_what_is_saved_is_loaded(tmp_path):
    saved = CheckpointFolder(tmp_path).save(manifest(7), layers(7))
    opened = Checkpoint.open(saved.path)
    assert opened.manifest == saved.manifest
    assert (opened.manifest.step, opened.manifest.samples_seen) == (7, 56)
    for name, tensors in layers(7).items():
        assert all(torch.equal(opened.layer(name)[key], value) for key, value in tensors.items())


def test_the_newest_is_found_and_old_ones_go(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.newest_complete() == (None, [])
    for step in (1, 2, 3, 10):
        folder.save(manifest(step), layers(step))
    folder.keep_latest(0)
    assert len(list(tmp_path.iterdir())) == 4
    folder.keep_latest(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]
    checkpoint, problems = folder.newest_complete()
    assert (checkpoint.manifest.step, problems) == (10, [])


def test_saving_a_step_again_replaces_it(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.save(manifest(1), layers(1))
    folder.save(manifest(1), layers(99))
    assert float(folder.newest_complete()[0].layer("first")["weight"][0]) == 99
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    folder = CheckpointFolder(tmp_path)
    path = folder.save(manifest(1), layers(1)).path
    path.rename(tmp_path / f".partial-replaced-{path.name}")  # as a kill would leave it
    assert folder.newest_complete()[0].manifest.step == 1


def damage_flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("file", ["first.safetensors", "last.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [damage_flip, damage_cut, lambda path: path.unlink()], ids=["flip", "cut", "gone"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, file, damage):
    folder = CheckpointFolder(tmp_path)
    folder.save(manifest(1), layers(1))
    damaged = folder.save(manifest(2), layers(2)).path
    damage(damaged / file)
    checkpoint, problems = folder.newest_complete()
    assert checkpoint.manifest.step == 1
    assert len(problems) == 1
    assert str(damaged) in problems[0]


def not_utf8(path):
    path.write_bytes(path.read_bytes().replace(b"llama", b"ll\xffma"))


def nested_too_deeply(path):
    path.write_bytes(path.read_bytes().replace(b'"model": {}', b'"model": {"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"))


def a_folder(path):
    path.unlink()
    path.mkdir()


def input_output_error(path):
    path.unlink()
    path.symlink_to("/proc/self/mem")  # reading it fails with EIO


@pytest.mark.parametrize("damage", [not_utf8, nested_too_deeply, a_folder, input_output_error])
def test_a_checkpoint_whose_manifest_cannot_be_read_is_passed_over(tmp_path, damage):
    folder = CheckpointFolder(tmp_path)
    folder.save(manifest(1), layers(1))
    damaged = folder.save(manifest(2), layers(2)).path / "manifest.json"
    whole = damaged.read_bytes()
    damage(damaged)
    assert damaged.is_dir() or damaged.is_symlink() or damaged.read_bytes() != whole
    checkpoint, problems = folder.newest_complete(layers=())  # as a trainer looks for the model's settings
    assert checkpoint.manifest.step == 1
    assert len(problems) == 1
    assert problems[0].startswith(f"{damaged} cannot be read: ")


def test_every_changed_byte_of_a_manifest_is_noticed(tmp_path):
    path = CheckpointFolder(tmp_path).save(manifest(1), layers(1)).path
    whole = (path / "manifest.json").read_bytes()
    for position in range(len(whole)):
        if whole[position : position + 1].isspace():
            continue
        changed = bytearray(whole)
        changed[position] ^= 1
        (path / "manifest.json").write_bytes(changed)
        with pytest.raises(UserError):
            Checkpoint.open(path)


def test_a_newer_format_is_refused_with_the_version_that_wrote_it(tmp_path):
    path = CheckpointFolder(tmp_path).save(manifest(1), layers(1)).path
    text = (path / "manifest.json").read_text().replace('"format_version": 3', '"format_version": 9')
    (path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match="format 9"):
        Checkpoint.open(path)


def test_no_checkpoint_is_an_error_that_says_so(tmp_path):
    with pytest.raises(UserError, match="no checkpoint"):
        Checkpoint.open(tmp_path)


SAVER = """
import sys
from pathlib import Path
from tests.checkpoint.test_storage import layers, manifest
from thinpipe.checkpoint import CheckpointFolder
folder = CheckpointFolder(Path(sys.argv[1]))
for step in range(int(sys.argv[2]), 10**6):
    print(step, flush=True)
    folder.save(manifest(step), layers(step, size=200_000))
    folder.keep_latest(2)
"""


@pytest.mark.parametrize("moments", [6, pytest.param(25, marks=pytest.mark.long)])
def test_kill_9_at_any_moment_of_saving_never_leaves_a_torn_checkpoint(tmp_path, moments):
    rng, folder, step, opened = random.Random(4), CheckpointFolder(tmp_path), 1, []
    for _ in range(moments):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True
        )
        for line in process.stdout:
            begun = int(line)
            if begun >= step + 1:
                break
        time.sleep(rng.uniform(0, 0.02))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        checkpoint, problems = folder.newest_complete()
        assert problems == []  # a torn folder never carries a checkpoint's name
        newest = checkpoint.manifest.step
        assert newest >= begun - 1  # what was finished before is not lost
        assert all((checkpoint.layer(name)["weight"] == newest).all() for name in ("first", "last"))
        opened.append(newest)
        step = newest + 1
    assert opened == sorted(set(opened))


def test_what_somebody_still_reads_is_not_removed(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"step-0000000{step}").mkdir()
    CheckpointFolder(tmp_path).keep_latest(1, exempt=[tmp_path / "step-00000001"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("name", ["first", "block.12", "console", "com"])
def test_names_of_layer_files(name):
    assert msgspec.convert(f"{name}.safetensors", LayerFileName)


@pytest.mark.parametrize("name", ["../first", "a/b", "a\\b", "c:a", ".x", "First", "", "con", "nul.x", "com1", "lpt9"])
def test_names_that_lead_elsewhere_or_to_a_device_of_windows(name):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(f"{name}.safetensors", LayerFileName)
