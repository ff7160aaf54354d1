"""`thinpipe hub`, `join`, `up`, `status` and `kick` as people use them: real processes, a real server."""

import json
import os
import re
import signal
from dataclasses import replace

import psutil
import pytest

from tests.programs import events_of, files_of, hub_arguments, invites_of, run_to_end, steps_of, wait_for_event
from tests.swarm.commits import wait_until
from thinpipe.config.run import JobConfig, ModelSettings
from thinpipe.config.toml import dump_toml
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerLeft
from thinpipe.swarm.peer.join import EXIT_TEMPFAIL
from thinpipe.training.trainer import Trainer

NO_PEER_LEFT = "stopped: all peers have ended before the run was finished"


@pytest.fixture
def run_config(run_config):
    """Three segments, and micro-batches for three peers."""
    return replace(run_config, parallelism=replace(run_config.parallelism, pipeline_parallel_microbatch_size=2))


@pytest.fixture
def run_host(run_config, tmp_path):
    """The same run in another folder, and its file."""
    config = replace(run_config, job=JobConfig(dump_folder=tmp_path / "hub_run"))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    return config, file


def test_up_trains_to_the_weights_of_one_process(run_config, run_host, programs):
    Trainer(run_config).train()
    config, file = run_host
    up = programs("up", "up", file, "--peers", 3)
    assert up.finish() == 0, up.printed
    assert up.printed.strip().splitlines()[-1] == f"finished: the trained model is in {config.job.dump_folder}"
    assert events_of(config, GenerationEnded)[-1].cause == "finished"
    assert files_of(config, 12) == files_of(run_config, 12)
    assert [step.loss for step in steps_of(config)] == [step.loss for step in steps_of(run_config)]
    assert {len(step.memory) for step in steps_of(config)} == {3}
    assert {len(step.memory) for step in steps_of(run_config)} == {1}
    assert min(held for step in steps_of(config) for held in step.memory) > 50 << 20, "what torch itself takes"
    code, printed = run_to_end("status", config.job.dump_folder)
    assert (code, printed.startswith("finished; ")) == (0, True), printed
    private = [config.job.dump_folder, *(config.job.dump_folder / "peers").iterdir()]
    assert [folder.stat().st_mode & 0o077 for folder in private] == [0] * 4, "data, weights and logs are their owners'"


def test_up_goes_on_from_a_checkpoint(run_config, tmp_path, programs):
    """Which each peer has in a folder of its own."""
    Trainer(run_config).train()
    begin = replace(run_config, model=ModelSettings(initial=run_config.job.dump_folder))
    twin, config = (replace(begin, job=JobConfig(dump_folder=tmp_path / name)) for name in ("twin", "up"))
    Trainer(twin).train()
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    up = programs("up", "up", file, "--peers", 2)
    assert up.finish() == 0, up.printed
    assert files_of(config, 12) == files_of(twin, 12)
    assert {len(step.memory) for step in steps_of(config)} == {2}


def test_up_ends_when_all_its_peers_have_failed_and_says_why(run_host, programs):
    config, file = run_host
    peers = config.job.dump_folder / "peers"
    for index in range(2):
        (peers / f"p{index}").mkdir(parents=True)
        (peers / f"p{index}" / "identity.toml").write_text("nobody = 1\n")
        (peers / f"p{index}" / "output.log").write_text("what an earlier process printed\n")
    up = programs("up", "up", file, "--peers", 2)
    assert up.finish() == 1, up.printed
    for index in range(2):
        assert re.search(rf"p{index} has failed: .*identity.toml.*p{index}/output.log", up.printed), up.printed
    assert up.printed.strip().splitlines()[-1] == NO_PEER_LEFT
    assert "an earlier process" not in up.printed


def test_peers_of_up_compute_on_the_device_of_the_settings(run_host, programs):
    _, file = run_host
    up = programs("up", "up", file, "--peers", 1, "--training.device", "cpu:99x")
    assert up.finish() == 1, up.printed
    assert "p0 has failed: thinpipe: there is no device 'cpu:99x' here: write auto, cpu" in up.printed


@pytest.mark.long
def test_up_goes_on_without_one_that_is_killed_and_ends_when_the_others_have_left(endless, programs):
    config, file = endless
    up = programs("up", "up", file, "--peers", 2)
    wait_for_event(config, GenerationStarted, generation=1)
    wait_until(lambda: steps_of(config))
    killed, leaving = peer_processes(up)
    os.kill(killed, signal.SIGKILL)
    up.until("p0 has failed: ended by SIGKILL")
    wait_for_event(config, GenerationStarted, generation=2)
    os.kill(leaving, signal.SIGINT)
    assert up.finish() == 1, up.printed
    assert up.printed.strip().splitlines()[-1] == NO_PEER_LEFT
    assert [event.cause for event in events_of(config, GenerationEnded)] == ["disconnected", "left"]


def peer_processes(up):
    """In the order in which it started them; its server is no peer."""
    children = psutil.Process(up.process.pid).children()
    return [child.pid for child in sorted(children, key=lambda child: child.create_time()) if "join" in child.cmdline()]


@pytest.fixture
def endless(run_host):
    """More steps than anyone waits for."""
    config, file = run_host
    config = replace(config, training=replace(config.training, steps=100_000))
    file.write_text(dump_toml(config))
    return config, file


def start_hub(programs, file, peers, *arguments):
    return programs("hub", *hub_arguments(file, peers, *arguments))


def test_people_join_look_leave_and_come_back(endless, programs, tmp_path):
    config, file = endless
    folder = config.job.dump_folder
    hub = start_hub(programs, file, 2)
    invites = invites_of(hub)
    anna = programs("anna", "join", invites[0], "--folder", tmp_path / "anna", "--name", "anna")
    bert = programs("bert", "join", invites[1], "--folder", tmp_path / "bert", "--name", "bert")
    hub.until(r"step: +10 ")

    for place in (folder, tmp_path / "bert"):
        code, printed = run_to_end("status", place)
        assert code == 0, printed
        assert re.search(r"generation 1\n.*step \d+ of 100000, loss", printed, re.S), printed
        assert "slowest part: " in printed
    code, printed = run_to_end("status", folder, "--json")
    peers = {peer["name"]: peer for peer in json.loads(printed)["peers"]}
    assert sorted(peers) == ["anna", "bert"]
    assert sum(peer["segments"] for peer in peers.values()) == 3
    assert all(peer["report"]["up_bps"] > 0 for peer in peers.values())

    code, printed = run_to_end("join", invites[0], "--folder", tmp_path / "thief")
    assert code == 2, "an invite works once"
    assert "this invite was used before, by anna" in printed

    bert.process.send_signal(signal.SIGINT)
    assert bert.finish() == 0, bert.printed
    left = wait_for_event(config, PeerLeft, peer="bert")
    assert left.cause == "left"
    ended = wait_for_event(config, GenerationEnded, generation=1)
    assert (ended.cause, ended.peer) == ("left", "bert"), "whichever peer the hub heard of first"
    anna.until("1 of 2 peers are connected; waiting for bert, for up to 60 s, then going on without")
    assert "all is saved" in bert.printed
    assert "another machine leaves, or the hub's owner stops the run: all is saved" in anna.printed
    again = programs("bert again", "join", tmp_path / "bert")
    again.until(r"resumed from .*step-000")
    wait_for_event(config, GenerationStarted, generation=2, step=ended.step)
    before = max(step.step for step in steps_of(config))
    wait_until(lambda: max(step.step for step in steps_of(config)) >= before + 3)
    steps = [step.step for step in steps_of(config)]
    assert steps == sorted(set(steps)), "who leaves saves first: no step is computed twice"

    assert run_to_end("kick", folder, "anna")[0] == 0
    assert wait_for_event(config, PeerLeft, peer="anna").cause == "kicked"
    assert anna.finish() == 2
    assert "the hub's owner removed this machine from the run" in anna.printed
    code, printed = run_to_end("join", tmp_path / "anna")
    assert code == 2
    assert "does not accept our key" in printed
    code, printed = run_to_end("kick", folder, "nobody")
    assert (code, "there is no peer 'nobody'" in printed) == (2, True)

    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert again.finish() == EXIT_TEMPFAIL, again.printed
    assert f"run `thinpipe join {tmp_path / 'bert'}` to continue when the hub runs again" in again.printed
