"""Peers that pause, freeze or hang, seen as people would: the run goes on with the spare, to the same weights."""

import re
import signal
import time
from dataclasses import replace

from tests.train.programs import files_of, hub_arguments, invites_of, newest_step, steps_of, train_until
from thinpipe.core.config import dump_toml
from thinpipe.train.config import CheckpointSection, JobSection
from thinpipe.train.join import COME_BACK

LOST_AFTER = 10


def workers_of(hub, epoch):
    line = hub.until(rf"epoch {epoch}: segments (.*?);")[1]
    return re.findall(r"(\w+): \d", line)


def until_step_after(hub, epoch):
    hub.until(rf"(?s)epoch {epoch}: .*step: .*step: ")


def test_short_pauses_are_borne_frozen_and_hanging_peers_are_replaced_and_come_back(run_config, programs, tmp_path):
    alone = replace(
        run_config,
        model=replace(run_config.model, boundaries=(2,)),
        training=replace(run_config.training, steps=100_000),
        checkpoint=CheckpointSection(interval=10, keep_latest_k=3),
    )
    hosted = replace(alone, job=JobSection(dump_folder=tmp_path / "hosted"))
    (tmp_path / "run.toml").write_text(dump_toml(hosted))
    more = ("--hub.up", "1gbps", "--hub.down", "1gbps", "--hub.patience-seconds", 0.5)
    hub = programs("hub", *hub_arguments(tmp_path / "run.toml", 3, *more, lost_after=LOST_AFTER))
    peers = {
        name: programs(
            name, "join", invite, "--folder", tmp_path / name, "--name", name, module="tests.train.stalling_peer"
        )
        for name, invite in zip(("anna", "bert", "carl"), invites_of(hub), strict=True)
    }
    paused = workers_of(hub, 1)[0]
    hub.until(r"step: +20 ")
    peers[paused].process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    peers[paused].process.send_signal(signal.SIGCONT)
    time.sleep(1)
    assert "is lost" not in hub.printed
    assert "epoch 1 is over" not in hub.printed

    peers[paused].process.send_signal(signal.SIGSTOP)
    hub.until(f"{paused} is lost: nothing was heard of it")
    assert paused not in workers_of(hub, 2)
    until_step_after(hub, 2)
    peers[paused].process.send_signal(signal.SIGCONT)
    hub.until(f"(?s){paused} is lost.*{paused} is there")
    peers[paused].until("is a spare")

    hanging = workers_of(hub, 2)[1]
    peers[hanging].process.send_signal(signal.SIGUSR1)
    peers[hanging].until("stalled")
    found = hub.until(
        rf"{hanging} is lost: its heart beats, but it has computed nothing for (\d+) s \(deadline {LOST_AFTER} s\)"
    )
    assert int(found[1]) >= LOST_AFTER
    assert workers_of(hub, 3) == [name for name in workers_of(hub, 3) if name != hanging]
    until_step_after(hub, 3)
    peers[hanging].process.send_signal(signal.SIGUSR2)
    hub.until(f"(?s){hanging} is lost.*{hanging} is there")
    peers[hanging].until("is a spare")

    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert [peer.finish() for peer in peers.values()] == [COME_BACK] * 3
    assert "epoch 4" not in hub.printed, "who comes back waits"
    last = newest_step(hosted)
    train_until(alone, last)
    assert files_of(hosted, last) == files_of(alone, last)
    told = {step.step: step.loss for step in steps_of(hosted)}
    assert told == {step.step: step.loss for step in steps_of(alone)}
