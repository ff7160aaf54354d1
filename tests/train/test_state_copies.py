"""Every commit has two holders: what the hub has lost comes back from peers, and sending it leaves room on the line."""

import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from tests.train.commits import (
    commit_by_hand,
    cut_short,
    flip_a_byte,
    push_all,
    save_by_hand,
    tell_saved,
    wait_until,
)
from tests.train.hubs import ask_again, ask_as, ask_next, begin_epoch, next_request, report, running_hub
from tests.train.programs import (
    PATIENCE,
    files_of,
    hub_arguments,
    invites_of,
    newest_step,
    train_until,
)
from thinpipe.checkpoint import CheckpointFolder
from thinpipe.checkpoint.folder import MANIFEST, layer_of
from thinpipe.core.config import dump_toml
from thinpipe.core.errors import UserError
from thinpipe.swarm.commit_history import Commit
from thinpipe.swarm.file_asks import FileTransferError
from thinpipe.swarm.messages import Answer, Done, Give, LeaveRequest, SavedRequest, Verdict, Wait, Work
from thinpipe.train.commit_record import state_of
from thinpipe.train.config import CheckpointSection, JobSection
from thinpipe.train.hosting import HostedRun
from thinpipe.train.hub_supplies import Keeper
from thinpipe.train.join import COME_BACK

# A share of the line


def test_a_keeper_sends_no_faster_than_it_may_and_hurries_at_the_end(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        begin_epoch(running, post)
        hosted = running.hub.hosted
        path = save_by_hand(hosted, 4, tmp_path)
        sizes = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
        names = sorted(sizes)
        before_last = sum(sizes.values()) - sizes[names[-1]]
        keeper = Keeper(post, 1, print, bytes_per_second=before_last / 2.0)
        began = time.monotonic()
        keeper.keep(path, names)
        wait_until(lambda: hosted.committed == 4)
        assert time.monotonic() - began >= 2.0, "all but the last file, at that rate"

        later = save_by_hand(hosted, 8, tmp_path)
        slow = Keeper(post, 1, print, bytes_per_second=before_last / 6000)
        slow.keep(later, names)
        wait_until(lambda: hosted.accept("p0", f"{later.name}/{names[0]}") is not None)
        slow.close()  # training is over: nobody else needs the line
        assert hosted.committed == 8
        keeper.close()


def test_everybody_is_told_a_share_of_the_line_and_the_same_interval(run_config):
    config = replace(run_config, checkpoint=CheckpointSection(line_share=0.1))
    with (
        running_hub(config, hub_bps=(1e9, 2e6)) as running,
        running.post("p0") as first,
        running.post("p1") as second,
    ):
        works = begin_epoch(running, first, second)
        rates = works[0].keep_bytes_per_second
        assert sum(rates.values()) == pytest.approx(0.1 * 2e6 / 8), "all that a tenth of the hub's line carries"
        assert works[0] == works[1]
        assert re.search(r"\ninterval = \d+\n", works[0].settings), "it is decided"
        words = works[0].text.partition("; ")[2]
        assert re.fullmatch(r"commit every \d+ steps: at most \d+ (s|min) of work can be lost", words)
        wait_until(lambda: words in running.said)
        assert running.hub.status().commits == words


def test_a_peer_keeps_what_the_hub_has_no_newer_one_for(run_config, tmp_path):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        begin_epoch(running, post)
        hosted = running.hub.hosted
        keeper = Keeper(post, 1, print, committed=0)
        folder = tmp_path / "checkpoints"
        paths = [save_by_hand(hosted, step, folder) for step in (4, 8)]
        names = [file.name for file in paths[0].glob("*.safetensors")]
        for step, path in zip((4, 8), paths, strict=True):
            keeper.keep(path, names)
            wait_until(lambda step=step: hosted.committed == step)
        keeper.close()
        # of step 8 it has not heard that it is committed; of step 4 it has
        assert set(keeper.needed(folder)) == set(paths)


# Files that the hub has lost

DAMAGES = [lambda path: path.unlink(), flip_a_byte, cut_short]


@pytest.mark.parametrize("damage", DAMAGES, ids=["deleted", "a byte flipped", "cut short"])
def test_a_file_that_the_hub_has_lost_is_given_again_before_the_next_epoch_begins(run_config, tmp_path, damage):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        begin_epoch(running, post)
        hosted = running.hub.hosted
        mine = commit_by_hand(post, hosted, 4, tmp_path)
        lost = next(iter(hosted.newest.manifest.files))
        damage(hosted.newest.path / lost)

        answer = ask_next(post, running, took_part_in=1, report=report(flops=1e9))
        assert isinstance(answer, Give)
        assert (answer.step, answer.files) == (4, {lost: hosted.newest.manifest.files[lost].sha256})
        assert running.hub.status().epoch == 0, "nothing begins without it"
        push_all(post, mine, answer.files)
        work = ask_next(post, running, took_part_in=1, gave=answer.manifest)
        assert isinstance(work, Work)
        assert msgspec.json.decode(work.manifest)["step"] == 4
        CheckpointFolder(hosted.checkpoints.folder).open(4)
        assert f"step 4 of {layer_of(lost)} is lost at the hub (held by p0): asking all who are there" in running.said
        assert "step 4 is whole again" in running.said


@pytest.mark.parametrize("while_it_runs", [True, False])
def test_a_commit_whose_folder_is_gone_is_given_again(run_config, tmp_path, while_it_runs):
    with running_hub(run_config, ("p0",)) as running, running.post("p0") as post:
        begin_epoch(running, post)
        hosted = running.hub.hosted
        mine = commit_by_hand(post, hosted, 4, tmp_path)
        shutil.rmtree(hosted.newest.path)
        if while_it_runs:
            give_all_and_begin(running, post, mine, took_part_in=1)
    if not while_it_runs:
        with running_hub(run_config, ("p1",)) as running, running.post("p1") as post:
            give_all_and_begin(running, post, mine)


def give_all_and_begin(running, post, mine, **fields):
    answer = ask_next(post, running, **fields)
    assert isinstance(answer, Give)
    assert (answer.step, len(answer.files)) == (4, len(running.hub.hosted.newest.manifest.files))
    push_all(post, mine, answer.files)
    work = ask_next(post, running, gave=answer.manifest, **fields)
    assert isinstance(work, Work)
    assert msgspec.json.decode(work.manifest)["step"] == 4
    running.hub.hosted.checkpoints.open(4)
    assert "step 4 is whole again" in running.said


@pytest.mark.parametrize("started_again", [True, False])
def test_what_can_never_be_whole_keeps_nobody_sending(run_config, tmp_path, started_again):
    """The other has told its part, and is started again or killed before it has sent it."""
    with running_hub(run_config) as running, running.post("p0") as first, running.post("p1") as second:
        begin_epoch(running, first, second)
        hosted = running.hub.hosted
        path = save_by_hand(hosted, 4, tmp_path)
        mine, *others = sorted(hosted.newest.manifest.files)
        for post, files in ((first, [mine]), (second, others)):
            request = SavedRequest(epoch=1, manifest=(path / MANIFEST).read_bytes(), files=files)
            assert ask_as(post, "saved", request, Verdict).refusal == ""
        push_all(second, path, others[:1])
        if started_again:
            second.tell("next", next_request(running, life="b"))
        else:
            second.close()
        wait_until(lambda: hosted.ledger.arriving is None)
        with pytest.raises(FileTransferError, match="it expects no such file from us"):
            push_all(first, path, [mine])


def test_when_nobody_has_it_the_run_goes_on_from_an_older_commit_and_says_so(run_config, tmp_path):
    with (
        running_hub(run_config, peers=("p0", "p1"), patience_seconds=1.0) as running,
        running.post("p0") as first,
        running.post("p1") as second,
    ):
        begin_epoch(running, first, second)
        hosted = running.hub.hosted
        for step in (4, 8):
            path = save_by_hand(hosted, step, tmp_path)
            tell_saved(first, path), tell_saved(second, path)
            push_all(second, path)
            assert hosted.committed == step
        lost = next(iter(hosted.newest.manifest.files))
        (hosted.newest.path / lost).unlink()
        ask_as(second, "leave", LeaveRequest(life="a"), Verdict)

        began = time.monotonic()
        answer = ask_next(first, running, took_part_in=1)
        assert isinstance(answer, Give)
        work = ask_again(first, running, took_part_in=1, gave=answer.manifest)
        assert isinstance(work, Work), work
        assert time.monotonic() - began >= 1.0, "somebody may come back"
        assert msgspec.json.decode(work.manifest)["step"] == 4
        place = hosted.checkpoints.folder / "lost-step-00000008"
        assert (
            f"step 8 of {layer_of(lost)} is lost at the hub (held by p1, who is away): going on from step 4; what is "
            f"left of step 8 is in {place}"
        ) in running.said
        assert place.is_dir()


def test_when_nothing_older_is_left_those_away_are_waited_for(run_config):
    with (
        running_hub(run_config, ("p0", "p1"), patience_seconds=0.5) as running,
        running.post("p0") as post,
        running.post("p1") as other,
    ):
        begin_epoch(running, post, other)
        (running.hub.hosted.newest.path / "blocks.1.safetensors").unlink()
        ask_as(other, "leave", LeaveRequest(life="a"), Verdict)
        answer = ask_next(post, running, took_part_in=1)
        assert isinstance(answer, Give)
        for _ in range(3):
            waits = ask_next(post, running, took_part_in=1, gave=answer.manifest)
            assert isinstance(waits, Wait), waits
        told = [line for line in running.said if line.endswith("waiting for those who are away")]
        assert len(told) == 1
        assert told[0].startswith("step 0 of blocks.1 is lost at the hub (")


def test_when_nothing_older_is_left_it_stops_and_names_the_layer(run_config):
    with running_hub(run_config, ("p0",), patience_seconds=0.5) as running, running.post("p0") as post:
        begin_epoch(running, post)
        hosted = running.hub.hosted
        (hosted.newest.path / "blocks.1.safetensors").unlink()
        answer = ask_next(post, running, took_part_in=1)
        assert isinstance(answer, Give)
        ended = ask_next(post, running, took_part_in=1, gave=answer.manifest)
        assert isinstance(ended, Done)
        assert ended.text.startswith("stopped: step 0 of blocks.1 is lost at the hub"), ended.text
        assert "there is no older checkpoint" in ended.text
        assert hosted.newest.path.exists(), "what is left stays where it is"


def test_a_hub_without_checkpoints_does_not_begin_anew_when_there_were_commits(run_config):
    with running_hub(run_config, ("p0",)) as running:
        hosted = running.hub.hosted
        hosted.commit_log.append(Commit.of(state_of(hosted.newest.manifest), 1, {}))
    shutil.rmtree(hosted.checkpoints.folder)
    with pytest.raises(UserError, match=r"no checkpoint is left .* and the run is not begun anew by itself"):
        HostedRun(run_config, None)


def test_a_hub_never_begins_anew_because_its_checkpoints_cannot_be_read(run_config):
    with running_hub(run_config, ("p0",)) as running:
        path = running.hub.hosted.newest.path
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"(?s)no checkpoint is left in .* and the run is not begun anew .*manifest"):
        HostedRun(run_config, None)


def test_real_peers_bring_back_what_the_hub_has_lost_and_the_weights_are_those_of_one_process(
    run_config, programs, tmp_path
):
    run_config = replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointSection(interval=4, keep_latest_k=2),
        parallelism=replace(run_config.parallelism, pipeline_parallel_microbatch_size=2),
    )
    config = replace(run_config, job=JobSection(dump_folder=tmp_path / "hosted"))
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
    hub.until(rf"(?s)step {int(newest.name[5:])} is whole again.* saved ")
    stop_and_compare(hub, (anna, bert), config, run_config)
    assert f"resumed from {tmp_path}" in hub.printed
    assert re.search(r"resumed from \S*/(step-\d+)", hub.printed)[1] == newest.name, "that very commit"


# Too little memory


def test_who_waits_is_told_for_whom_and_how_much_memory_is_missing(run_config):
    with (
        running_hub(run_config, patience_seconds=0.5) as running,
        running.post("p0") as first,
        running.post("p1") as second,
    ):
        needs = [need.memory_nbytes for need in running.hub.hosted.needs]
        shared = running.hub.hosted.shared_nbytes
        for_two = report(memory_nbytes=shared + sum(needs) - min(needs))
        asked = [post.ask("next", next_request(running, report=for_two), seconds=PATIENCE) for post in (first, second)]
        assert all(isinstance(msgspec.msgpack.decode(each.result(PATIENCE), type=Answer), Work) for each in asked)
        ask_as(second, "leave", LeaveRequest(life="a"), Verdict)
        answer = ask_next(first, running, took_part_in=1, report=for_two)
        assert isinstance(answer, Wait)
        expected = r"waiting for p1: the model needs [\d.]+ MB, and .* another machine with [\d.]+ kB would help"
        assert re.fullmatch(expected, answer.text), answer.text
        assert answer.text in running.said
        assert running.hub.status().waits_for == answer.text


# A full disk


def stop_and_compare(hub, peers, config, alone):
    """All stop with a commit: it is the one that a single process comes to."""
    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert [peer.finish() for peer in peers] == [COME_BACK] * len(peers), [peer.printed for peer in peers]
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
    config = replace(run_config, job=JobSection(dump_folder=disk / "run"))
    with (
        small_disk(disk, 8 << 20) as ballast,
        running_hub(config, ("p0",)) as running,
        running.post("p0") as post,
    ):
        begin_epoch(running, post)
        hosted = running.hub.hosted
        path = save_by_hand(hosted, 4, tmp_path)
        assert tell_saved(post, path).refusal == ""
        fill(ballast)
        with pytest.raises(FileTransferError, match=r"cannot write the file .No space left"):
            push_all(post, path)
        assert "the hub cannot write step-00000004/" in hosted.display.console.file.getvalue()
        refused = tell_saved(post, save_by_hand(hosted, 8, tmp_path)).refusal
        assert refused in ("", "the hub cannot write (No space left on device)")
        assert hosted.committed == 0
        answer = ask_next(post, running, took_part_in=1)
        assert answer == Wait(text="the hub cannot go on (No space left on device): put that right there")

        ballast.unlink()
        work = ask_next(post, running, took_part_in=1)
        assert isinstance(work, Work)
        commit_by_hand(post, hosted, 12, tmp_path, epoch=work.epoch)


def test_a_peer_whose_disk_is_full_goes_on_and_the_next_commit_has_all(run_config, programs, tmp_path):
    run_config = replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointSection(interval=4, keep_latest_k=1),
        validation=replace(run_config.validation, freq=0),
    )
    config = replace(run_config, job=JobSection(dump_folder=tmp_path / "hosted"))
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
        hub.until(r"could not be saved|No space left")
        ballast.unlink()
        hub.until(r"(?s)(could not be saved|No space left).* saved ")
        stop_and_compare(hub, peers, config, run_config)
    assert "epoch 2" not in hub.printed, "nobody had to begin anew"
