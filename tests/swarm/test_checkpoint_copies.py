"""Every commit has two holders: peers restore what the hub has lost, and uploads leave bandwidth to training."""

import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from tests.programs import (
    PATIENCE,
    events_of,
    files_of,
    hub_arguments,
    invites_of,
    newest_step,
    train_until,
    wait_for_event,
)
from tests.swarm.commits import (
    commit_by_hand,
    cut_short,
    flip_a_byte,
    push_all,
    save_by_hand,
    tell_saved,
    wait_until,
)
from tests.swarm.hubs import ask_again, ask_as, ask_next, begin_generation, next_request, report, running_hub
from thinpipe.checkpoint import CheckpointFolder
from thinpipe.checkpoint.storage import layer_of
from thinpipe.config.run import CheckpointConfig, JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.core.event_text import format_event
from thinpipe.core.events import Saved, SaveFailed
from thinpipe.core.hub_events import CheckpointDamaged, CheckpointRepaired, GenerationStarted, RolledBack
from thinpipe.swarm.hub.commits.history import Commit
from thinpipe.swarm.hub.commits.recovery import state_of
from thinpipe.swarm.hub.training_host import TrainingHost
from thinpipe.swarm.peer.join import EXIT_TEMPFAIL
from thinpipe.swarm.peer.remote_run import Uploader
from thinpipe.swarm.peer.request_pipeline import FileTransferError
from thinpipe.swarm.protocol.messages import (
    Answer,
    Assignment,
    Finished,
    LeaveReply,
    LeaveRequest,
    RestoreFiles,
    Standby,
)

# A share of the uplink


def test_an_uploader_sends_no_faster_than_it_may_and_hurries_at_the_end(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        run_host = running.hub.run_host
        path = save_by_hand(run_host, 4, tmp_path)
        sizes = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
        names = sorted(sizes)
        before_last = sum(sizes.values()) - sizes[names[-1]]
        uploader = Uploader(connection, 1, print, bytes_per_second=before_last / 2.0)
        began = time.monotonic()
        uploader.enqueue(path, names)
        wait_until(lambda: run_host.committed == 4)
        assert time.monotonic() - began >= 2.0, "all but the last file, at that rate"

        later = save_by_hand(run_host, 8, tmp_path)
        slow = Uploader(connection, 1, print, bytes_per_second=before_last / 6000)
        slow.enqueue(later, names)
        wait_until(lambda: run_host.accept("p0", f"{later.name}/{names[0]}") is not None)
        slow.close()  # training is over: nobody else needs the line
        assert run_host.committed == 8
        uploader.close()


def test_everybody_is_told_a_share_of_the_uplink_and_the_same_interval(run_config):
    config = replace(run_config, checkpoint=CheckpointConfig(uplink_share=0.1))
    with (
        running_hub(config, hub_bps=(1e9, 2e6)) as running,
        running.connection("p0") as first,
        running.connection("p1") as second,
    ):
        works = begin_generation(running, first, second)
        rates = works[0].upload_bytes_per_second
        assert sum(rates.values()) == pytest.approx(0.1 * 2e6 / 8), "a tenth of the hub's downlink"
        assert works[0] == works[1]
        assert re.search(r"\ninterval = \d+\n", works[0].settings), "it is decided"
        words = works[0].text.partition("; ")[2]
        assert re.fullmatch(r"a commit every \d+ steps, about every \d+ (s|min)", words)
        wait_until(lambda: words in running.printed)
        now = running.hub.status().commit_summary
        assert now.startswith(f"{words}; newest: step 0; at most ")


def test_a_peer_keeps_what_the_hub_has_no_newer_one_for(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        run_host = running.hub.run_host
        uploader = Uploader(connection, 1, print, committed=0)
        folder = tmp_path / "checkpoints"
        paths = [save_by_hand(run_host, step, folder) for step in (4, 8)]
        names = [file.name for file in paths[0].glob("*.safetensors")]
        for step, path in zip((4, 8), paths, strict=True):
            uploader.enqueue(path, names)
            wait_until(lambda step=step: run_host.committed == step)
        uploader.close()
        # of step 8 it has not heard that it is committed; of step 4 it has
        assert set(uploader.protected(folder)) == set(paths)


# Files that the hub has lost

DAMAGES = [lambda path: path.unlink(), flip_a_byte, cut_short]


@pytest.mark.parametrize("damage", DAMAGES, ids=["deleted", "a byte flipped", "cut short"])
def test_a_file_that_the_hub_has_lost_is_given_again_before_the_next_generation_begins(run_config, tmp_path, damage):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        run_host = running.hub.run_host
        mine = commit_by_hand(run_host, 4, tmp_path, connection)
        lost = next(iter(run_host.newest.manifest.files))
        damage(run_host.newest.path / lost)

        answer = ask_next(connection, running, left_generation=1, report=report(flops=1e9))
        assert isinstance(answer, RestoreFiles)
        assert (answer.step, answer.files) == (4, {lost: run_host.newest.manifest.files[lost].sha256})
        assert running.hub.status().generation == 0, "nothing begins without it"
        push_all(connection, mine, answer.files)
        work = ask_next(connection, running, left_generation=1, uploaded=answer.manifest)
        assert isinstance(work, Assignment)
        assert msgspec.json.decode(work.manifest)["step"] == 4
        CheckpointFolder(run_host.checkpoints.folder).open(4)
        (damaged,), (repaired,) = events_of(run_config, CheckpointDamaged), events_of(run_config, CheckpointRepaired)
        assert (damaged.step, damaged.layers, repaired.step) == (4, [layer_of(lost)], 4)
        assert damaged.reason == f"the hub has lost {layer_of(lost)} of step 4 (copies at p0)"
        assert {format_event(damaged), format_event(repaired)} <= set(running.printed)


@pytest.mark.parametrize("while_it_runs", [True, False])
def test_a_commit_whose_folder_is_gone_is_given_again(run_config, tmp_path, while_it_runs):
    with running_hub(run_config, ("p0",)) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        run_host = running.hub.run_host
        mine = commit_by_hand(run_host, 4, tmp_path, connection)
        shutil.rmtree(run_host.newest.path)
        if while_it_runs:
            give_all_and_begin(running, connection, mine, left_generation=1)
    if not while_it_runs:
        with running_hub(run_config, ("p1",)) as running, running.connection("p1") as connection:
            give_all_and_begin(running, connection, mine)


def give_all_and_begin(running, connection, mine, **fields):
    answer = ask_next(connection, running, **fields)
    assert isinstance(answer, RestoreFiles)
    assert (answer.step, len(answer.files)) == (4, len(running.hub.run_host.newest.manifest.files))
    push_all(connection, mine, answer.files)
    work = ask_next(connection, running, uploaded=answer.manifest, **fields)
    assert isinstance(work, Assignment)
    assert msgspec.json.decode(work.manifest)["step"] == 4
    running.hub.run_host.checkpoints.open(4)
    config = running.hub.run_host.config
    assert [event.step for event in events_of(config, CheckpointRepaired)] == [4]


@pytest.mark.parametrize("started_again", [True, False])
def test_what_can_never_be_whole_keeps_nobody_sending(run_config, tmp_path, started_again):
    """The other has told its part, and is started again or killed before it has sent it."""
    with running_hub(run_config) as running, running.connection("p0") as first, running.connection("p1") as second:
        begin_generation(running, first, second)
        run_host = running.hub.run_host
        path = save_by_hand(run_host, 4, tmp_path)
        assert tell_saved(first, run_host, path).retry_later
        wanted = tell_saved(second, run_host, path).wanted
        (mine, *_) = tell_saved(first, run_host, path).wanted
        push_all(second, path, wanted[:1])
        if started_again:
            second.publish("next", next_request(running, incarnation="b"))
        else:
            second.close()
        wait_until(lambda: run_host.ledger.pending_step is None)
        with pytest.raises(FileTransferError, match="does not expect this file"):
            push_all(first, path, [mine])


def test_when_nobody_has_it_the_run_goes_on_from_an_older_commit_and_says_so(run_config, tmp_path):
    with (
        running_hub(run_config, peers=("p0", "p1"), patience_seconds=1.0) as running,
        running.connection("p0") as first,
        running.connection("p1") as second,
    ):
        begin_generation(running, first, second)
        run_host = running.hub.run_host
        for step in (4, 8):
            commit_by_hand(run_host, step, tmp_path, first, second)
        lost = next(iter(run_host.newest.manifest.files))
        (run_host.newest.path / lost).unlink()
        ask_as(second, "leave", LeaveRequest(incarnation="a"), LeaveReply)

        began = time.monotonic()
        answer = ask_next(first, running, left_generation=1)
        assert isinstance(answer, RestoreFiles)
        work = ask_again(first, running, left_generation=1, uploaded=answer.manifest)
        assert isinstance(work, Assignment), work
        assert time.monotonic() - began >= 1.0, "somebody may come back"
        assert msgspec.json.decode(work.manifest)["step"] == 4
        place = run_host.checkpoints.folder / "lost-step-00000008"
        (rolled_back,) = events_of(run_config, RolledBack)
        assert (rolled_back.step, rolled_back.lost_step, rolled_back.folder) == (4, 8, str(place))
        assert re.fullmatch(rf"the hub has lost {layer_of(lost)} of step 8 \(copies at .*\)", rolled_back.reason)
        assert format_event(rolled_back) in running.printed
        assert place.is_dir()


@pytest.mark.long
def test_when_nothing_older_is_left_those_away_are_waited_for(run_config):
    with (
        running_hub(run_config, ("p0", "p1"), patience_seconds=0.5) as running,
        running.connection("p0") as connection,
        running.connection("p1") as other,
    ):
        begin_generation(running, connection, other)
        (running.hub.run_host.newest.path / "blocks.1.safetensors").unlink()
        ask_as(other, "leave", LeaveRequest(incarnation="a"), LeaveReply)
        answer = ask_next(connection, running, left_generation=1)
        assert isinstance(answer, RestoreFiles)
        texts = []
        for _ in range(8):
            waits = ask_next(connection, running, left_generation=1, uploaded=answer.manifest)
            assert isinstance(waits, Standby), waits
            texts.append(waits.text.endswith("waiting for p1 to connect"))
            time.sleep(0.1)
        assert texts == sorted(texts), "once said, it is said until something changes"
        (damaged,) = events_of(run_config, CheckpointDamaged)
        assert (damaged.step, damaged.layers) == (0, ["blocks.1"])
        assert waits.text.startswith("the hub has lost blocks.1 of step 0 (")
        assert waits.text.endswith("waiting for p1 to connect")
        assert running.printed.count(waits.text) == 1


def test_when_nothing_older_is_left_it_stops_and_names_the_layer(run_config):
    with running_hub(run_config, ("p0",), patience_seconds=0.5) as running, running.connection("p0") as connection:
        begin_generation(running, connection)
        run_host = running.hub.run_host
        (run_host.newest.path / "blocks.1.safetensors").unlink()
        answer = ask_next(connection, running, left_generation=1)
        assert isinstance(answer, RestoreFiles)
        ended = ask_next(connection, running, left_generation=1, uploaded=answer.manifest)
        assert isinstance(ended, Finished)
        assert ended.text.startswith("stopped: the hub has lost blocks.1 of step 0"), ended.text
        assert "there is no older checkpoint" in ended.text
        assert run_host.newest.path.exists(), "what is left stays where it is"


def test_a_hub_without_checkpoints_does_not_begin_anew_when_there_were_commits(run_config):
    with running_hub(run_config, ("p0",)) as running:
        run_host = running.hub.run_host
        run_host.commit_log.append(Commit.of(state_of(run_host.newest.manifest), 1, {}))
    shutil.rmtree(run_host.checkpoints.folder)
    with pytest.raises(UserError, match=r"no complete checkpoint is left in .* to start a new run"):
        TrainingHost(run_config, None)


def test_a_hub_never_begins_anew_because_its_checkpoints_cannot_be_read(run_config):
    with running_hub(run_config, ("p0",)) as running:
        path = running.hub.run_host.newest.path
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"(?s)no complete checkpoint is left in .* to start a new run.*manifest"):
        TrainingHost(run_config, None)


def test_real_peers_bring_back_what_the_hub_has_lost_and_the_weights_are_those_of_one_process(
    run_config, programs, tmp_path
):
    run_config = replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointConfig(interval=4, keep_latest_k=2),
        parallelism=replace(run_config.parallelism, pipeline_parallel_microbatch_size=2),
    )
    config = replace(run_config, job=JobConfig(dump_folder=tmp_path / "hub_run"))
    (tmp_path / "run.toml").write_text(dump_toml(config))
    arguments = hub_arguments(tmp_path / "run.toml", 2)
    hub = programs("hub", *arguments)
    anna, bert = (
        programs(name, "join", invite, "--folder", tmp_path / name, "--name", name)
        for name, invite in zip(("anna", "bert"), invites_of(hub), strict=True)
    )
    hub.until(r"step: +8 .*saved")
    hub.stop()
    bert.stop()
    newest = sorted((config.job.dump_folder / "checkpoints").glob("step-*"))[-1]
    for damage, name in zip(DAMAGES, ("first", "blocks.1", "last"), strict=True):
        damage(newest / f"{name}.safetensors")

    hub = programs("hub again", *arguments)
    bert = programs("bert again", "join", tmp_path / "bert")
    repaired = wait_for_event(config, CheckpointRepaired, step=int(newest.name[5:]))
    wait_for_event(config, Saved, after=repaired)
    stop_and_compare(hub, (anna, bert), config, run_config)
    assert f"resumed from {tmp_path}" in hub.printed
    assert re.search(r"resumed from \S*/(step-\d+)", hub.printed)[1] == newest.name, "that very commit"


# Too little memory


def test_who_waits_is_told_for_whom_and_how_much_memory_is_missing(run_config):
    with (
        running_hub(run_config, patience_seconds=0.5) as running,
        running.connection("p0") as first,
        running.connection("p1") as second,
    ):
        needs = [need.memory_nbytes for need in running.hub.run_host.run_model.needs]
        shared = running.hub.run_host.run_model.shared_nbytes
        for_two = report(memory_nbytes=shared + sum(needs) - min(needs))
        asked = [
            connection.submit("next", next_request(running, report=for_two), seconds=PATIENCE)
            for connection in (first, second)
        ]
        assert all(isinstance(msgspec.msgpack.decode(each.result(PATIENCE), type=Answer), Assignment) for each in asked)
        ask_as(second, "leave", LeaveRequest(incarnation="a"), LeaveReply)
        answer = ask_next(first, running, left_generation=1, report=for_two)
        assert isinstance(answer, Standby)
        expected = r"waiting for p1: the model needs [\d.]+ MB, and .* another machine with [\d.]+ kB would help"
        assert re.fullmatch(expected, answer.text), answer.text
        assert answer.text in running.printed
        assert running.hub.status().waits_for == answer.text


# A full disk


def stop_and_compare(hub, peers, config, alone):
    """All stop with a commit: it is the one that a single process comes to."""
    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert [peer.finish() for peer in peers] == [EXIT_TEMPFAIL] * len(peers), [peer.printed for peer in peers]
    last = newest_step(config)
    assert last > 0
    train_until(alone, last)
    assert files_of(config, last) == files_of(alone, last)


@contextmanager
def small_disk(place, nbytes):
    place.mkdir(parents=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", place], capture_output=True)
    if made.returncode:
        pytest.skip(f"needs to mount a small disk: {made.stderr.decode().strip()}")
    try:
        yield place / "ballast"
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def fill(ballast):
    """All of the disk, but for nothing."""
    with ballast.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def test_a_hub_whose_disk_is_full_says_so_and_commits_again_when_there_is_room(run_config, tmp_path):
    disk = tmp_path / "disk"
    config = replace(run_config, job=JobConfig(dump_folder=disk / "run"))
    with (
        small_disk(disk, 8 << 20) as ballast,
        running_hub(config, ("p0",)) as running,
        running.connection("p0") as connection,
    ):
        begin_generation(running, connection)
        run_host = running.hub.run_host
        path = save_by_hand(run_host, 4, tmp_path)
        assert tell_saved(connection, run_host, path).refusal == ""
        fill(ballast)
        with pytest.raises(FileTransferError, match=r"cannot write the file .No space left"):
            push_all(connection, path)
        assert "the hub cannot write step-00000004/" in run_host.display.console.file.getvalue()
        refused = tell_saved(connection, run_host, save_by_hand(run_host, 8, tmp_path)).refusal
        assert refused in ("", "the hub cannot write (No space left on device)")
        assert run_host.committed == 0
        answer = ask_next(connection, running, left_generation=1)
        assert answer == Standby(
            text="the hub cannot start a generation (No space left on device): its owner has to fix this"
        )

        ballast.unlink()
        work = ask_next(connection, running, left_generation=1)
        assert isinstance(work, Assignment)
        commit_by_hand(run_host, 12, tmp_path, connection, generation=work.generation)


def test_a_peer_whose_disk_is_full_goes_on_and_the_next_commit_has_all(run_config, programs, tmp_path):
    run_config = replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointConfig(interval=4, keep_latest_k=1),
        validation=replace(run_config.validation, freq=0),
    )
    config = replace(run_config, job=JobConfig(dump_folder=tmp_path / "hub_run"))
    (tmp_path / "run.toml").write_text(dump_toml(config))
    arguments = hub_arguments(tmp_path / "run.toml", 2)
    with small_disk(tmp_path / "disk", 8 << 20) as ballast:
        hub = programs("hub", *arguments)
        peers = [
            programs(name, "join", invite, "--folder", folder, "--name", name)
            for name, folder, invite in zip(
                ("anna", "bert"), (tmp_path / "anna", tmp_path / "disk" / "bert"), invites_of(hub), strict=True
            )
        ]
        hub.until(r"step: +8 .*saved")
        fill(ballast)
        failed = wait_for_event(config, SaveFailed)
        ballast.unlink()
        wait_for_event(config, Saved, after=failed)
        stop_and_compare(hub, peers, config, run_config)
    assert len(events_of(config, GenerationStarted)) == 1, "nobody had to begin anew"
