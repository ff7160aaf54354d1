"""Peers that train honestly and cheat when they save: commits come, with the bytes of those who computed them."""

import re
from dataclasses import replace as changed

import pytest

from tests.programs import files_of, newest_step, run_to_end, train_until, wait_for_event
from tests.swarm.hostile.dishonest import replace
from thinpipe.config.run import CheckpointConfig, JobConfig
from thinpipe.core.events import Saved
from thinpipe.core.hub_events import CheckpointAbandoned, CommitsOverdue, CommitsResumed, FilesRefused


@pytest.fixture
def run_config(run_config):
    return changed(run_config, checkpoint=CheckpointConfig(interval=4, keep_latest_k=2))


def says_that_it_wrote_the_layer_of_another():
    """To the other peers and to the hub; it uploads constants in its place."""
    import torch

    from thinpipe.checkpoint.storage import CheckpointFolder
    from thinpipe.swarm.peer import remote_run
    from thinpipe.swarm.peer.remote_run import Uploader
    from thinpipe.swarm.peer.request_pipeline import FileTransferError

    stolen = []

    def write(honest, folder, step, layers):
        victim = "last" if "first" in layers else "first"
        stolen[:] = [f"{victim}.safetensors"]
        return honest(folder, step, {**layers, victim: {"weight": torch.full((8, 8), 0.001)}})

    def announce(honest, uploader, announcement):
        wanted = honest(uploader, announcement)
        return wanted and [*stolen, *wanted]

    def push(honest, connection, path, name, **how):
        try:
            honest(connection, path, name, **how)
        except FileTransferError as error:
            print(f"pushing {name}: {error}", flush=True)

    replace(CheckpointFolder, "write", write)
    replace(Uploader, "enqueue", lambda honest, uploader, path, files: honest(uploader, path, [*stolen, *files]))
    replace(Uploader, "_announce", announce)
    replace(remote_run, "push", push)


def test_a_peer_cannot_commit_the_layer_of_another(start_hub, join, join_dishonestly, run_config, tmp_path):
    hub, invites = start_hub(2)
    mallory = join_dishonestly(invites[0], "mallory", says_that_it_wrote_the_layer_of_another)
    anna = join(invites[1], "anna")
    named = wait_for_event(run_config, FilesRefused)
    assert named.peer == "mallory"
    assert re.fullmatch(r"mallory announces (first|last)\.safetensors, which is a file of anna", named.reason)
    hub.until("thinpipe kick")
    mallory.until(r"pushing step-\d+/(first|last).safetensors: .*does not expect this file from this peer")
    anna.until(r"names other contents of (first|last)\.safetensors, which this process has written")
    wait_for_event(run_config, Saved, step=12)
    hub.process.terminate()
    assert hub.finish() == 0, hub.printed
    last = newest_step(run_config)
    assert last >= 12
    alone = changed(run_config, job=JobConfig(dump_folder=tmp_path / "alone"))
    train_until(alone, last)
    assert files_of(run_config, last) == files_of(alone, last)


def uploads_nothing():
    from thinpipe.swarm.peer.remote_run import Uploader

    replace(Uploader, "_announce", lambda honest, uploader, announcement: honest(uploader, announcement) and [])


def announces_nothing():
    from thinpipe.swarm.peer.remote_run import Uploader

    replace(Uploader, "enqueue", lambda *_: None)


def announces_with_another_key():
    from thinpipe.swarm.peer import remote_run
    from thinpipe.swarm.protocol.keys import KeyPair

    key = KeyPair.new()
    replace(remote_run, "sign_file", lambda honest, _own, *what: honest(key, *what))


@pytest.mark.parametrize(
    ("lie", "owed"),
    [
        (uploads_nothing, r"mallory has not uploaded .*\.safetensors"),
        pytest.param(announces_nothing, r"nothing by mallory", marks=pytest.mark.long),
        pytest.param(
            announces_with_another_key,
            r"mallory was refused: .* is not signed with the key of mallory",
            marks=pytest.mark.long,
        ),
    ],
)
def test_when_no_commits_come_the_owner_hears_who_owes_what_until_they_do(
    lie, owed, start_hub, join, join_dishonestly, programs, run_config, tmp_path
):
    hub, invites = start_hub(2)
    join(invites[0], "anna")
    mallory = join_dishonestly(invites[1], "mallory", lie)
    hub.until(rf"ALARM: no commit for .* of training, since step 0: .*{owed}")
    assert wait_for_event(run_config, CommitsOverdue).seconds >= 30
    code, status = run_to_end("status", run_config.job.dump_folder)
    assert code == 0
    shown = " ".join(status.split())
    assert re.search(r"NO COMMIT since step 0 \(.*at most .* can be lost now, and more", shown), status
    if lie is uploads_nothing:
        assert "mallory has not uploaded" in wait_for_event(run_config, CheckpointAbandoned).reason
    mallory.stop()
    programs("mallory again", "join", tmp_path / "mallory")
    hub.until(f"commits come again: step {wait_for_event(run_config, CommitsResumed).step} ")
