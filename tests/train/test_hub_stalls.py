"""Peers that pause, freeze or hang, seen as people would: the run goes on with the spare, to the same weights."""

import re
import signal
import time
from dataclasses import replace

import pytest

from tests.train.programs import files_of, invites_of, steps_of
from thinpipe.core.config import dump_toml
from thinpipe.train.config import CheckpointSection, JobSection
from thinpipe.train.loop import Trainer

SLOW, STEPS = 200, 600


def workers_of(hub, epoch):
    line = hub.until(rf"epoch {epoch}: segments (.*?);", SLOW)[1]
    return re.findall(r"(\w+): \d", line)


def until_step_after(hub, epoch):
    hub.until(rf"(?s)epoch {epoch}: .*step: .*step: ", SLOW)


@pytest.mark.timeout(600)
def test_short_pauses_are_borne_frozen_and_hanging_peers_are_replaced_and_come_back(run_config, programs, tmp_path):
    alone = replace(
        run_config,
        model=replace(run_config.model, boundaries=(2,)),
        training=replace(run_config.training, steps=STEPS),
        checkpoint=CheckpointSection(interval=10, keep_latest_k=3),
    )
    Trainer(alone).train()
    hosted = replace(alone, job=JobSection(dump_folder=tmp_path / "hosted"))
    (tmp_path / "run.toml").write_text(dump_toml(hosted))
    hub = programs(
        *("hub", "hub", tmp_path / "run.toml", "--hub.peers", 3, "--hub.everyone", "--hub.address", "127.0.0.1"),
        *("--hub.up", "1gbps", "--hub.down", "1gbps", "--hub.patience-seconds", 0.5),
        *("--hub.lost-after-seconds", 3, "--hub.progress-floor-seconds", 4),
    )
    peers = {
        name: programs(
            name, "join", invite, "--folder", tmp_path / name, "--name", name, module="tests.train.stalling_peer"
        )
        for name, invite in zip(("anna", "bert", "carl"), invites_of(hub), strict=True)
    }
    paused = workers_of(hub, 1)[0]
    hub.until(r"step: +20 ", SLOW)
    peers[paused].process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    peers[paused].process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert "is lost" not in hub.printed
    assert "epoch 1 is over" not in hub.printed

    peers[paused].process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    hub.until(f"{paused} is lost: nothing was heard of it", SLOW)
    assert time.monotonic() - began < 5
    assert paused not in workers_of(hub, 2)
    time.sleep(max(0.0, 8 - (time.monotonic() - began)))
    peers[paused].process.send_signal(signal.SIGCONT)
    hub.until(f"(?s){paused} is lost.*{paused} is there", 30)
    peers[paused].until("is a spare", 30)

    until_step_after(hub, 2)
    hanging = workers_of(hub, 2)[1]
    peers[hanging].process.send_signal(signal.SIGUSR1)
    peers[hanging].until("stalled")
    began = time.monotonic()
    found = hub.until(rf"{hanging} is lost: its heart beats, but it has computed nothing for (\d+) s \(deadline 4 s\)")
    assert time.monotonic() - began < 8
    assert int(found[1]) >= 4
    assert workers_of(hub, 3) == [name for name in workers_of(hub, 3) if name != hanging]
    until_step_after(hub, 3)
    peers[hanging].process.send_signal(signal.SIGUSR2)
    hub.until(f"(?s){hanging} is lost.*{hanging} is there", 30)
    peers[hanging].until("is a spare", 30)

    assert hub.finish(SLOW) == 0, hub.printed
    assert [peer.finish() for peer in peers.values()] == [0, 0, 0]
    assert "epoch 4" not in hub.printed, "who comes back waits"
    assert files_of(hosted, STEPS) == files_of(alone, STEPS)
    assert {step.step: step.loss for step in steps_of(hosted)} == {step.step: step.loss for step in steps_of(alone)}
