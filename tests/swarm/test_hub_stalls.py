"""Peers that pause, freeze or hang, seen as people would: the run goes on with the standby, to the same weights."""

import re
import signal
import time
from dataclasses import replace

from tests.programs import files_of, hub_arguments, invites_of, newest_step, steps_of, train_until
from thinpipe.config.run import CheckpointConfig, JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.swarm.peer.join import EXIT_TEMPFAIL

LOST_AFTER = 10


def peers_of_generation(hub, generation):
    line = hub.until(rf"generation {generation}: segments (.*?);")[1]
    return re.findall(r"(\w+): \d", line)


def until_step_after(hub, generation):
    hub.until(rf"(?s)generation {generation}: .*step: .*step: ")


def test_short_pauses_are_borne_frozen_and_hanging_peers_are_replaced_and_come_back(run_config, programs, tmp_path):
    alone = replace(
        run_config,
        model=replace(run_config.model, boundaries=(2,)),
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointConfig(interval=10, keep_latest_k=3),
    )
    run_host = replace(alone, job=JobConfig(dump_folder=tmp_path / "hub_run"))
    (tmp_path / "run.toml").write_text(dump_toml(run_host))
    more = ("--hub.up", "1gbps", "--hub.down", "1gbps", "--hub.patience-seconds", 0.5)
    hub = programs("hub", *hub_arguments(tmp_path / "run.toml", 3, *more, heartbeat_timeout=LOST_AFTER))
    peers = {
        name: programs(
            name, "join", invite, "--folder", tmp_path / name, "--name", name, module="tests.swarm.stalling_peer"
        )
        for name, invite in zip(("anna", "bert", "carl"), invites_of(hub), strict=True)
    }
    paused = peers_of_generation(hub, 1)[0]
    hub.until(r"step: +20 ")
    peers[paused].process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    peers[paused].process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert "is lost" not in hub.printed
    assert "generation 1 is over" not in hub.printed

    peers[paused].process.send_signal(signal.SIGSTOP)
    hub.until(f"{paused} is lost: nothing was heard of it")
    assert paused not in peers_of_generation(hub, 2)
    until_step_after(hub, 2)
    peers[paused].process.send_signal(signal.SIGCONT)
    hub.until(f"(?s){paused} is lost.*{paused} is there")
    peers[paused].until("is a standby")

    hanging = peers_of_generation(hub, 2)[1]
    peers[hanging].process.send_signal(signal.SIGUSR1)
    peers[hanging].until("stalled")
    found = hub.until(
        rf"{hanging} is lost: heartbeats arrive, but it has computed nothing for (\d+) s \(deadline {LOST_AFTER} s\)"
    )
    assert int(found[1]) >= LOST_AFTER
    assert peers_of_generation(hub, 3) == [name for name in peers_of_generation(hub, 3) if name != hanging]
    until_step_after(hub, 3)
    peers[hanging].process.send_signal(signal.SIGUSR2)
    hub.until(f"(?s){hanging} is lost.*{hanging} is there")
    peers[hanging].until("is a standby")

    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert [peer.finish() for peer in peers.values()] == [EXIT_TEMPFAIL] * 3
    assert "generation 4" not in hub.printed, "who comes back waits"
    last = newest_step(run_host)
    train_until(alone, last)
    assert files_of(run_host, last) == files_of(alone, last)
    told = {step.step: step.loss for step in steps_of(run_host)}
    assert told == {step.step: step.loss for step in steps_of(alone)}
