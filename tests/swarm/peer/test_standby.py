"""A standby's copy of the newest checkpoint costs its link little, and nothing has to be fetched when it is needed."""

import time
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from tests.programs import PATIENCE
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_next, next_request, report, running_hub
from thinpipe.checkpoint import Checkpoint, Manifest
from thinpipe.config.run import JobConfig
from thinpipe.core.run_folder import MANIFEST
from thinpipe.swarm.hub import answers as long_polls
from thinpipe.swarm.peer import standby as standby_mirror
from thinpipe.swarm.peer.remote_run import RemoteRun
from thinpipe.swarm.peer.standby import StandbyMirror
from thinpipe.swarm.protocol.messages import Answer, Assignment, Standby

SLOW, PIECE_NBYTES = 8e3, 16 << 10
"""Bytes a second, of which a checkpoint takes minutes; and the least that is fetched at once."""


@pytest.fixture
def uncut(run_config):
    """One segment, so that the second peer is a standby."""
    subspace = replace(run_config.model.subspace, free_last=False)
    return replace(run_config, model=replace(run_config.model, boundaries=(), subspace=subspace))


def copied(folder, manifest):
    path = folder / "checkpoints" / f"step-{manifest.step:08}"
    return (path / MANIFEST).exists() and Checkpoint.open(path).manifest.sha256 == manifest.sha256


def copied_nbytes(folder):
    return sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*.safetensors*"))


def announced_by(wait):
    return msgspec.json.decode(wait.manifest, type=Manifest).sha256


def commit_next(run_host, step=4):
    """A checkpoint in which one file has changed."""
    layers = {name.removesuffix(".safetensors"): None for name in run_host.newest.manifest.files}
    tensors = {layer: run_host.newest.layer(layer) for layer in layers}
    next(iter(tensors["last"].values())).add_(1.0)
    manifest = msgspec.structs.replace(run_host.newest.manifest, step=step)
    run_host.newest = run_host.checkpoints.save(manifest, tensors)
    return run_host.newest.manifest


def test_a_standby_copies_what_is_new_and_then_needs_nothing(uncut, tmp_path, monkeypatch):
    with running_hub(uncut) as running, running.connection("p0") as first, running.connection("p1") as second:
        run_host, mirror, folder = running.hub.run_host, StandbyMirror(tmp_path / "p1"), tmp_path / "p1"
        asked = [connection.submit("next", next_request(running), seconds=PATIENCE) for connection in (first, second)]
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        (assignment,), (wait,) = ([one for one in answers if isinstance(one, kind)] for kind in (Assignment, Standby))
        connection = second if isinstance(answers[1], Standby) else first
        manifest = run_host.newest.manifest
        assert announced_by(wait) == manifest.sha256
        mirror.follow(connection, wait.manifest, bytes_per_second=1e8)
        wait_until(lambda: copied(folder, manifest))

        monkeypatch.setattr(long_polls, "LONG_POLL_SECONDS", 10 * PATIENCE)
        later = connection.submit("next", next_request(running), seconds=PATIENCE)
        newer = commit_next(run_host)
        wait = msgspec.msgpack.decode(later.result(PATIENCE), type=Answer)  # who waits hears of a commit at once
        assert announced_by(wait) == newer.sha256
        before = {path.name: path.stat().st_ino for path in (folder / "checkpoints" / "step-00000000").iterdir()}
        mirror.follow(connection, wait.manifest, bytes_per_second=1e8)
        wait_until(lambda: copied(folder, newer))
        mirror.stop()
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000004"]
        after = {path.name: path.stat().st_ino for path in (folder / "checkpoints" / "step-00000004").iterdir()}
        changed = {name for name in after if after[name] != before[name]}
        assert changed == {"last.safetensors", MANIFEST}, "what has not changed is not fetched"

        remote_run = RemoteRun(
            connection,
            msgspec.structs.replace(assignment, manifest=wait.manifest),
            replace(uncut, job=JobConfig(dump_folder=folder)),
            print,
        )
        run_host.newest = Checkpoint(run_host.newest.path, msgspec.structs.replace(newer, files={}))
        with closing(remote_run):
            remote_run.fetch([name.removesuffix(".safetensors") for name in newer.files], ())


def test_a_standby_can_be_interrupted_and_goes_on_later(uncut, tmp_path):
    with running_hub(uncut, ("p0",)) as running, running.connection("p0") as connection:
        assert isinstance(ask_next(connection, running, report=report()), Assignment)
        manifest, mirror = running.hub.run_host.newest_manifest(), StandbyMirror(tmp_path / "p0")
        told = msgspec.json.decode(manifest, type=Manifest)
        nbytes = sum(entry.nbytes for entry in told.files.values())
        began = time.monotonic()
        for _ in range(2):
            mirror.follow(connection, manifest, bytes_per_second=SLOW)
        wait_until(lambda: copied_nbytes(tmp_path / "p0") > 0)
        mirror.stop()
        most = 4 * PIECE_NBYTES + SLOW * (time.monotonic() - began)
        assert 0 < copied_nbytes(tmp_path / "p0") < min(nbytes, most), "no faster than told"
        mirror.follow(connection, manifest, bytes_per_second=None)
        wait_until(lambda: copied(tmp_path / "p0", told))


def test_a_standby_without_room_has_no_copy_and_says_so(uncut, tmp_path, monkeypatch):
    monkeypatch.setattr(standby_mirror, "_FREE_NBYTES", 1 << 60)
    with running_hub(uncut, ("p0",)) as running, running.connection("p0") as connection:
        mirror = StandbyMirror(tmp_path / "p0")
        mirror.follow(connection, running.hub.run_host.newest_manifest(), bytes_per_second=None)
        wait_until(lambda: mirror.problem)
        assert "this standby downloads its layers when it is assigned" in mirror.problem
        assert not list((tmp_path / "p0").rglob("*.safetensors*"))
