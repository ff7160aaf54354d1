"""What ends a run for everybody, and what ends no more than an epoch."""

import os
import shutil
import signal
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from tests.train.commits import wait_until
from tests.train.hubs import begin_epoch, next_request, report, running_hub
from tests.train.programs import PATIENCE, files_of, invites_of, steps_of
from tests.train.test_hub import start_hub
from tests.train.test_loop import in_folder
from tests.train.test_state_copies import fill, small_disk, stop_and_compare
from thinpipe.core.config import dump_toml
from thinpipe.core.events import Skipped, Stopped
from thinpipe.swarm.messages import Answer, Done, Work
from thinpipe.train.config import CheckpointSection, JobSection
from thinpipe.train.hub_supplies import HubSupplies
from thinpipe.train.loop import Trainer

DIVERGED = Stopped(step=7, reason="not_finite")


def supplies_of(post, work, config, tmp_path):
    return closing(HubSupplies(post, work, replace(config, job=JobSection(dump_folder=tmp_path / "peer")), print))


def test_why_the_run_stops_is_heard_also_after_somebody_has_asked_what_comes_next(run_config, tmp_path):
    """All stop at the same vote, and the first peer may have the slowest line."""
    with running_hub(run_config) as running, running.post("p0") as first, running.post("p1") as second:
        work, _ = begin_epoch(running, first, second)
        with supplies_of(first, work, run_config, tmp_path) as supplies:
            asked = second.ask("next", next_request(running, took_part_in=1), seconds=PATIENCE)
            wait_until(lambda: running.hub.roster.current is None)
            supplies.heard(DIVERGED)
            assert msgspec.msgpack.decode(asked.result(PATIENCE), type=Answer) == Done(text="stopped: not_finite")


def test_what_is_told_of_an_older_epoch_is_not_taken_for_this_one(run_config, tmp_path):
    with running_hub(run_config) as running, running.post("p0") as first, running.post("p1") as second:
        old, _ = begin_epoch(running, first, second)
        asked = [
            post.ask("next", next_request(running, took_part_in=1, report=report(flops=flops)), seconds=PATIENCE)
            for post, flops in ((first, 1e9), (second, 2e9))
        ]
        new = msgspec.msgpack.decode(asked[0].result(PATIENCE), type=Answer)
        assert isinstance(new, Work)
        assert (new.epoch, new.names[0]) == (2, "p0")
        with (
            supplies_of(first, old, run_config, tmp_path) as late,
            supplies_of(first, new, run_config, tmp_path) as now,
        ):
            late.heard(DIVERGED)
            now.heard(Skipped(step=1, loss=None, culprit="loss"))
            wait_until(lambda: "skipped: loss" in running.hub.hosted.display.console.file.getvalue())
        assert running.hub.hosted.ended == ""


@pytest.fixture
def disturbed(run_config, tmp_path):
    """A run of more steps than anyone waits for, the same in another folder, and its file."""
    run_config = replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointSection(interval=1000),
        validation=replace(run_config.validation, freq=0),
    )
    return run_config, in_folder(run_config, "hosted"), tmp_path / "run.toml"


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
        assert "could not save" in hub.until(r"step: +\d+ +could not save.*")[0]
        hub.until("epoch 2: ")
        go_on_and_compare(hub, [anna], config, alone)


@pytest.mark.parametrize(
    "left", [0, pytest.param(16 << 10, marks=pytest.mark.long)], ids=["for nothing", "for a manifest and no block"]
)
def test_who_has_no_room_to_begin_waits_for_it_and_comes_back(disturbed, programs, tmp_path, left):
    alone, config, file = disturbed
    alone, config = (replace(each, checkpoint=CheckpointSection(interval=20)) for each in (alone, config))
    with small_disk(tmp_path / "disk", 64 << 20) as ballast:
        folders = tmp_path / "anna", tmp_path / "disk" / "bert"
        hub, anna, bert = start(programs, file, config, folders, patience=PATIENCE)  # anna waits for him
        hub.until(r"step: +20 +saved")
        bert.stop()
        shutil.rmtree(tmp_path / "disk" / "bert" / "checkpoints")
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - left)
        again = programs("again", "join", tmp_path / "disk" / "bert")
        again.until(r"no room on the disk of .*/bert; the others go on without this machine")
        again.until(r"make room for at least .* this machine waits for it")
        assert again.process.poll() is None
        ballast.unlink()
        hub.until(r"(?s)epoch 2: .*epoch 3: ")
        go_on_and_compare(hub, [anna, again], config, alone)


def test_the_last_step_is_tried_again_until_it_can_be_saved(disturbed, programs, tmp_path):
    """There is room for all that an epoch needs, and not for the state."""
    alone, config, file = disturbed
    alone, config = (replace(each, training=replace(each.training, steps=100)) for each in (alone, config))
    Trainer(alone).train()
    with small_disk(tmp_path / "disk", 8 << 20) as ballast:
        hub, anna, bert = start(programs, file, config, (tmp_path / "anna", tmp_path / "disk" / "bert"))
        hub.until(r"step: +1 ")
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - (64 << 10))
        bert.until(r"the last step could not be saved: make room; trying again in 10 s")
        ballast.unlink()
        assert hub.finish() == 0, hub.printed
        assert [peer.finish() for peer in (anna, bert)] == [0, 0], anna.printed + bert.printed
    assert "epoch 2: " in hub.printed
    assert files_of(config, 100) == files_of(alone, 100)
