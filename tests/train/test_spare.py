"""A spare's copy of the newest checkpoint costs the line little, and nothing has to be fetched when it is needed."""

import time
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from tests.train.commits import wait_until
from tests.train.hubs import ask_next, next_request, report, running_hub
from tests.train.programs import PATIENCE
from thinpipe.checkpoint import Checkpoint, Manifest
from thinpipe.checkpoint.folder import MANIFEST
from thinpipe.swarm import epochs
from thinpipe.swarm.messages import Answer, Wait, Work
from thinpipe.train import spare as spares
from thinpipe.train.config import JobSection
from thinpipe.train.hub_supplies import HubSupplies
from thinpipe.train.spare import Spare

SLOW, PIECE_NBYTES = 8e3, 16 << 10
"""Bytes a second, of which a checkpoint takes minutes; and the least that is fetched at once."""


@pytest.fixture
def uncut(run_config):
    """One segment, so that the second peer is a spare."""
    subspace = replace(run_config.model.subspace, free_last=False)
    return replace(run_config, model=replace(run_config.model, boundaries=(), subspace=subspace))


def copied(folder, manifest):
    path = folder / "checkpoints" / f"step-{manifest.step:08}"
    return (path / MANIFEST).exists() and Checkpoint.open(path).manifest.sha256 == manifest.sha256


def copied_nbytes(folder):
    return sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*.safetensors*"))


def told_by(wait):
    return msgspec.json.decode(wait.manifest, type=Manifest).sha256


def commit_next(hosted, step=4):
    """A checkpoint in which one file has changed."""
    layers = {name.removesuffix(".safetensors"): None for name in hosted.newest.manifest.files}
    tensors = {layer: hosted.newest.layer(layer) for layer in layers}
    next(iter(tensors["last"].values())).add_(1.0)
    manifest = msgspec.structs.replace(hosted.newest.manifest, step=step)
    hosted.newest = hosted.checkpoints.save(manifest, tensors)
    return hosted.newest.manifest


def test_a_spare_copies_what_is_new_and_then_needs_nothing(uncut, tmp_path, monkeypatch):
    with running_hub(uncut) as running, running.post("p0") as first, running.post("p1") as second:
        hosted, spare, folder = running.hub.hosted, Spare(tmp_path / "p1"), tmp_path / "p1"
        asked = [post.ask("next", next_request(running), seconds=PATIENCE) for post in (first, second)]
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        (work,), (wait,) = ([one for one in answers if isinstance(one, kind)] for kind in (Work, Wait))
        post = second if isinstance(answers[1], Wait) else first
        manifest = hosted.newest.manifest
        assert told_by(wait) == manifest.sha256
        spare.follow(post, wait.manifest, bytes_per_second=1e8)
        wait_until(lambda: copied(folder, manifest))

        monkeypatch.setattr(epochs, "ANSWER_SECONDS", 10 * PATIENCE)
        later = post.ask("next", next_request(running), seconds=PATIENCE)
        newer = commit_next(hosted)
        wait = msgspec.msgpack.decode(later.result(PATIENCE), type=Answer)  # who waits hears of a commit at once
        assert told_by(wait) == newer.sha256
        before = {path.name: path.stat().st_ino for path in (folder / "checkpoints" / "step-00000000").iterdir()}
        spare.follow(post, wait.manifest, bytes_per_second=1e8)
        wait_until(lambda: copied(folder, newer))
        spare.stop()
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"]
        after = {path.name: path.stat().st_ino for path in (folder / "checkpoints" / "step-00000004").iterdir()}
        changed = {name for name in after if after[name] != before[name]}
        assert changed == {"last.safetensors", MANIFEST}, "what has not changed is not fetched"

        supplies = HubSupplies(
            post,
            msgspec.structs.replace(work, manifest=wait.manifest),
            replace(uncut, job=JobSection(dump_folder=folder)),
            print,
        )
        hosted.newest = Checkpoint(hosted.newest.path, msgspec.structs.replace(newer, files={}))
        with closing(supplies):
            supplies.fetch([name.removesuffix(".safetensors") for name in newer.files], ())


def test_a_spare_can_be_interrupted_and_goes_on_later(uncut, tmp_path):
    with running_hub(uncut, ("p0",)) as running, running.post("p0") as post:
        assert isinstance(ask_next(post, running, report=report()), Work)
        manifest, spare = running.hub.hosted.newest_manifest(), Spare(tmp_path / "p0")
        told = msgspec.json.decode(manifest, type=Manifest)
        nbytes = sum(entry.nbytes for entry in told.files.values())
        began = time.monotonic()
        for _ in range(2):
            spare.follow(post, manifest, bytes_per_second=SLOW)
        wait_until(lambda: copied_nbytes(tmp_path / "p0") > 0)
        spare.stop()
        most = 4 * PIECE_NBYTES + SLOW * (time.monotonic() - began)
        assert 0 < copied_nbytes(tmp_path / "p0") < min(nbytes, most), "no faster than told"
        spare.follow(post, manifest, bytes_per_second=None)
        wait_until(lambda: copied(tmp_path / "p0", told))


def test_a_spare_without_room_has_no_copy_and_says_so(uncut, tmp_path, monkeypatch):
    monkeypatch.setattr(spares, "_FREE_NBYTES", 1 << 60)
    with running_hub(uncut, ("p0",)) as running, running.post("p0") as post:
        spare = Spare(tmp_path / "p0")
        spare.follow(post, running.hub.hosted.newest_manifest(), bytes_per_second=None)
        wait_until(lambda: spare.problem)
        assert "this spare fetches its part when it is needed" in spare.problem
        assert not list((tmp_path / "p0").rglob("*.safetensors*"))
