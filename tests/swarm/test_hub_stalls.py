"""Peers that pause, freeze or hang, seen as people would: the run goes on with the standby, to the same weights."""

import re
import signal
import time
from dataclasses import replace

from tests.programs import (
    events_of,
    files_of,
    hub_arguments,
    invites_of,
    newest_step,
    steps_of,
    train_until,
    wait_for_event,
)
from thinpipe.config.run import CheckpointConfig, JobConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import Step
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerJoined, PeerLeft
from thinpipe.swarm.peer.join import EXIT_TEMPFAIL

LOST_AFTER = 10


def peers_of_generation(config, generation):
    return [peer.name for peer in wait_for_event(config, GenerationStarted, generation=generation).peers]


def until_step_after(config, generation):
    wait_for_event(config, Step, after=wait_for_event(config, GenerationStarted, generation=generation))


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
    paused = peers_of_generation(run_host, 1)[0]
    hub.until(r"step: +20 ")
    peers[paused].process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    peers[paused].process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert events_of(run_host, PeerLeft, GenerationEnded) == []

    peers[paused].process.send_signal(signal.SIGSTOP)
    lost = wait_for_event(run_host, PeerLeft, peer=paused)
    assert lost.cause == "no_heartbeat"
    assert paused not in peers_of_generation(run_host, 2)
    until_step_after(run_host, 2)
    peers[paused].process.send_signal(signal.SIGCONT)
    wait_for_event(run_host, PeerJoined, after=lost, peer=paused)
    peers[paused].until("is a standby")

    hanging = peers_of_generation(run_host, 2)[1]
    peers[hanging].process.send_signal(signal.SIGUSR1)
    peers[hanging].until("stalled")
    lost = wait_for_event(run_host, PeerLeft, peer=hanging)
    assert lost.cause == "stalled"
    found = re.search(rf"has computed nothing for (\d+) s, and its deadline is {LOST_AFTER} s", lost.reason)
    assert found is not None, lost.reason
    assert int(found[1]) >= LOST_AFTER
    assert peers_of_generation(run_host, 3) == [name for name in peers_of_generation(run_host, 3) if name != hanging]
    until_step_after(run_host, 3)
    peers[hanging].process.send_signal(signal.SIGUSR2)
    wait_for_event(run_host, PeerJoined, after=lost, peer=hanging)
    peers[hanging].until("is a standby")

    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert [peer.finish() for peer in peers.values()] == [EXIT_TEMPFAIL] * 3
    assert len(events_of(run_host, GenerationStarted)) == 3, "who comes back waits"
    assert events_of(run_host, GenerationEnded)[-1].cause == "stopped"
    last = newest_step(run_host)
    train_until(alone, last)
    assert files_of(run_host, last) == files_of(alone, last)
    told = {step.step: step.loss for step in steps_of(run_host)}
    assert told == {step.step: step.loss for step in steps_of(alone)}
