"""What ends a run for everybody, and what ends no more than a generation."""

import os
import shutil
import signal
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from tests.programs import PATIENCE, events_of, files_of, invites_of, steps_of, wait_for_event
from tests.swarm.commits import wait_until
from tests.swarm.hubs import begin_generation, next_request, report, running_hub
from tests.swarm.test_checkpoint_copies import fill, small_disk, stop_and_compare
from tests.swarm.test_hub import start_hub
from tests.train.test_trainer import in_folder
from thinpipe.config.run import CheckpointConfig, JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import SaveFailed, Stopped
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted
from thinpipe.swarm.peer.remote_run import RemoteRun
from thinpipe.swarm.protocol.messages import Answer, Assignment, Finished
from thinpipe.training.trainer import Trainer

DIVERGED = Stopped(step=7, reason="not_finite")


def make_remote_run(connection, assignment, config, tmp_path):
    return closing(
        RemoteRun(connection, assignment, replace(config, job=JobConfig(dump_folder=tmp_path / "peer")), print)
    )


def test_a_peer_that_says_that_the_run_has_diverged_does_not_end_it(run_config, tmp_path):
    """The hub has seen no sum of a step that is not finite."""
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        assignment, _ = begin_generation(running, first, second)
        with make_remote_run(first, assignment, run_config, tmp_path) as remote_run:
            remote_run.on_event(DIVERGED)
            asked = [
                connection.submit(
                    "next", next_request(running, left_generation=1, stop_reason="not_finite"), seconds=PATIENCE
                )
                for connection in (first, second)
            ]
            answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert Assignment in map(type, answers), answers
        assert Finished not in map(type, answers)
        assert running.hub.run_host.ended == ""
        assert events_of(run_config, Stopped) == []
        (ended,) = events_of(run_config, GenerationEnded)
        assert "no sum of the steps shows" in ended.reason


def test_what_is_told_of_an_older_generation_is_not_taken_for_this_one(run_config, tmp_path):
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        old, _ = begin_generation(running, first, second)
        asked = [
            connection.submit(
                "next", next_request(running, left_generation=1, report=report(flops=flops)), seconds=PATIENCE
            )
            for connection, flops in ((first, 1e9), (second, 2e9))
        ]
        new = msgspec.msgpack.decode(asked[0].result(PATIENCE), type=Answer)
        assert isinstance(new, Assignment)
        assert (new.generation, new.names[0]) == (2, "p0")
        with (
            make_remote_run(first, old, run_config, tmp_path) as late,
            make_remote_run(first, new, run_config, tmp_path) as now,
        ):
            late.on_event(DIVERGED)
            now.on_event(SaveFailed(step=1, reason="of now"))
            wait_for_event(run_config, SaveFailed, reason="of now")
        assert running.hub.run_host.ended == ""


@pytest.fixture
def disturbed(run_config, tmp_path):
    """A run of more steps than anyone waits for, the same in another folder, and its file."""
    run_config = replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointConfig(interval=1000),
        validation=replace(run_config.validation, freq=0),
    )
    return run_config, in_folder(run_config, "hub_run"), tmp_path / "run.toml"


def start(programs, file, config, folders, *, patience=2):
    file.write_text(dump_toml(config))
    hub = start_hub(programs, file, 2, "--hub.patience-seconds", patience)
    return hub, *(
        programs(folder.name, "join", invite, "--folder", folder, "--name", folder.name)
        for folder, invite in zip(folders, invites_of(hub), strict=True)
    )


def go_on_and_compare(hub, peers, config, alone):
    before = len(steps_of(config))
    wait_until(lambda: len(steps_of(config)) > before + 3)
    stop_and_compare(hub, peers, config, alone)


def test_who_leaves_with_a_full_disk_does_not_end_the_run_for_others(disturbed, programs, tmp_path):
    alone, config, file = disturbed
    with small_disk(tmp_path / "disk", 8 << 20) as ballast:
        hub, anna, bert = start(programs, file, config, (tmp_path / "anna", tmp_path / "disk" / "bert"))
        hub.until(r"step: +10 ")
        fill(ballast)
        bert.process.send_signal(signal.SIGINT)
        assert bert.finish() == 0, bert.printed
        wait_for_event(config, SaveFailed)
        wait_for_event(config, GenerationStarted, generation=2)
        go_on_and_compare(hub, [anna], config, alone)


@pytest.mark.long
@pytest.mark.parametrize("left", [0, 16 << 10], ids=["for nothing", "for a manifest and no block"])
def test_who_has_no_room_to_begin_waits_for_it_and_comes_back(disturbed, programs, tmp_path, left):
    alone, config, file = disturbed
    alone, config = (replace(each, checkpoint=CheckpointConfig(interval=20)) for each in (alone, config))
    with small_disk(tmp_path / "disk", 64 << 20) as ballast:
        folders = tmp_path / "anna", tmp_path / "disk" / "bert"
        hub, anna, bert = start(programs, file, config, folders, patience=PATIENCE)  # anna waits for him
        hub.until(r"step: +20 +saved")
        bert.stop()
        shutil.rmtree(tmp_path / "disk" / "bert" / "checkpoints")
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - left)
        will_resume = programs("again", "join", tmp_path / "disk" / "bert")
        will_resume.until(r"the disk of .*/bert is full; the other peers continue without this machine")
        will_resume.until(r"free at least .* this machine waits until then")
        assert will_resume.process.poll() is None
        ballast.unlink()
        wait_for_event(config, GenerationStarted, generation=3)
        go_on_and_compare(hub, [anna, will_resume], config, alone)


@pytest.mark.long
def test_the_last_step_is_tried_again_until_it_can_be_saved(disturbed, programs, tmp_path):
    """There is room for all that a generation needs, and not for the state."""
    alone, config, file = disturbed
    alone, config = (replace(each, training=replace(each.training, steps=100)) for each in (alone, config))
    Trainer(alone).train()
    with small_disk(tmp_path / "disk", 8 << 20) as ballast:
        hub, anna, bert = start(programs, file, config, (tmp_path / "anna", tmp_path / "disk" / "bert"))
        hub.until(r"step: +1 ")
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - (64 << 10))
        bert.until(r"the last step could not be saved: free disk space; trying again in 10 s")
        ballast.unlink()
        assert hub.finish() == 0, hub.printed
        assert [peer.finish() for peer in (anna, bert)] == [0, 0], anna.printed + bert.printed
    ends = [(event.generation, event.cause) for event in events_of(config, GenerationEnded)]
    assert ends[0] == (1, "not_saved")
    assert ends[-1][1] == "finished"
    assert files_of(config, 100) == files_of(alone, 100)
