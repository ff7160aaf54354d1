"""A peer that sends bad values: once, and the step is computed again; twice, and the others remove it."""

import json
import re
import signal
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import pytest

from benchmarks.chaos.poison import LOG, TIMES, read_injections
from tests.programs import (
    PATIENCE,
    events_of,
    files_of,
    invites_of,
    newest_step,
    steps_of,
    train_until,
    wait_for_event,
)
from tests.swarm.hubs import begin_generation, next_request, running_hub
from tests.swarm.test_hub import start_hub
from tests.train.test_trainer import events, in_folder
from thinpipe.config.run import CheckpointConfig, ParallelismConfig
from thinpipe.config.toml import dump_toml
from thinpipe.core.events import GenerationEnded, GenerationStarted, PeerLeft, Retried, Saved, Skipped, Stopped
from thinpipe.swarm.broker.broker import BrokerError
from thinpipe.swarm.peer.join import EXIT_TEMPFAIL
from thinpipe.swarm.protocol.messages import Accusation, Answer, Assignment, Standby

TIMES_OF = {"anna": 1, "bert": 1, "carl": 2, "dora": 2}


@pytest.fixture
def run_config(run_config):
    """Three segments for four peers: one is a standby. More steps than anyone waits for."""
    return replace(
        run_config,
        training=replace(run_config.training, steps=100_000),
        parallelism=ParallelismConfig(pipeline_parallel_microbatch_size=2),
        checkpoint=CheckpointConfig(interval=20, keep_latest_k=2),
    )


def test_a_peer_that_is_bad_once_stays_and_one_that_is_bad_twice_is_removed(run_config, programs, tmp_path):
    run_host = in_folder(run_config, "hub_run")
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(run_host))
    hub = start_hub(programs, file, 4, "--hub.patience-seconds", 2)
    peers = {
        name: programs(
            name,
            *("join", invite, "--folder", tmp_path / name, "--name", name),
            module="benchmarks.chaos.poison",
            environment={LOG: str(tmp_path / f"{name}.log"), TIMES: str(times)},
        )
        for (name, times), invite in zip(TIMES_OF.items(), invites_of(hub), strict=True)
    }
    at_work = [peer.name for peer in wait_for_event(run_host, GenerationStarted, generation=1).peers]
    assert len(at_work) == 3
    once = next(name for name in at_work if TIMES_OF[name] == 1)
    twice = next(name for name in at_work if TIMES_OF[name] == 2)
    hub.until(r"step: +10 ")
    peers[once].process.send_signal(signal.SIGUSR1)
    wait_for_event(run_host, Retried, sender=once)
    peers[twice].process.send_signal(signal.SIGUSR1)
    removed = wait_for_event(run_host, PeerLeft, peer=twice)
    assert removed.cause == "accused"
    assert re.search(r"bad values twice in step \d+: .*, found by \w+", removed.reason), removed.reason
    ended = wait_for_event(run_host, GenerationEnded, generation=1)
    assert (ended.cause, ended.peer) == ("accused", twice)
    assert peers[twice].finish() == 2
    assert "the other peers removed this machine from the run, because it sent bad values" in peers[twice].printed
    wait_for_event(run_host, Saved, after=wait_for_event(run_host, GenerationStarted, generation=2))
    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert [peer.finish() for name, peer in peers.items() if name != twice] == [EXIT_TEMPFAIL] * 3

    injected = {name: [each.place for each in read_injections(tmp_path / f"{name}.log")] for name in peers}
    assert {name: len(places) for name, places in injected.items() if places} == {once: 1, twice: 2}
    told = [(event.step, event.boundary, event.forward, event.sender) for event in events(run_host, Retried)]
    assert told == [(p.step, p.boundary, p.forward, n) for n in (once, twice) for p in injected[n][:1]]
    assert events(run_host, Skipped) == []
    last = newest_step(run_host)
    assert {step.step for step in steps_of(run_host)} >= set(range(1, last + 1))
    train_until(run_config, last)
    assert files_of(run_host, last) == files_of(run_config, last)


def test_a_run_that_has_diverged_stops_and_costs_one_peer_its_place_at_most(run_config, programs, tmp_path):
    """Whoever has the first segment sends bad values from step 10 on, on any machine: it is the run itself."""
    config = replace(run_config, checkpoint=CheckpointConfig(interval=4, keep_latest_k=2))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    hub = start_hub(programs, file, 3, "--hub.patience-seconds", 2)
    plan = json.dumps([[step, 0, True, 2, "nan"] for step in range(10, 60)])
    peers = [
        programs(
            name,
            *("join", invite, "--folder", tmp_path / name, "--name", name),
            module="tests.train.poisoning",
            environment={"POISON": plan, "POISON_RANK": "0"},
        )
        for name, invite in zip(("anna", "bert", "carl"), invites_of(hub), strict=True)
    ]
    hub.finish()
    assert events_of(config, Stopped)[-1].reason == "not_finite"
    causes = [event.cause for event in events_of(config, PeerLeft)]
    assert causes.count("accused") == 1, causes
    assert sorted(peer.finish() for peer in peers) == [0, 0, 2]
    assert [event.step for event in events(config, Skipped)] == [10, 11, 12]
    assert len(events_of(config, GenerationStarted)) == 2
    assert events_of(config, GenerationEnded)[-1].cause == "not_finite"


def test_the_others_remove_who_they_accuse_and_hear_for_which_step(run_config):
    """Peers driven by hand: who is not of the generation, or accuses itself, is not believed; half of the others
    are."""
    names = ("p0", "p1", "p2")
    bad, other = (Accusation(name=name, step=7, what="state over boundary 0 is not finite") for name in ("p1", "p2"))
    with running_hub(run_config, names, patience_seconds=2.0) as running, ExitStack() as posts:
        first, second, third = (posts.enter_context(running.connection(name)) for name in names)
        assert [work.removal_steps for work in begin_generation(running, first, second, third)] == [[], [], []]
        lie = third.submit("next", next_request(running, left_generation=0, accusation=bad), seconds=PATIENCE)
        assert lie.result(PATIENCE)
        assert "p1" in running.hub.broker.peers, "who has not taken part cannot know"
        asked = [
            connection.submit("next", next_request(running, left_generation=1, accusation=each), seconds=PATIENCE)
            for connection, each in ((second, bad), (first, bad), (third, other))
        ]
        work = msgspec.msgpack.decode(asked[1].result(PATIENCE), type=Answer)
        assert (work.generation, sorted(work.names), work.removal_steps) == (2, ["p0", "p2"], [7])
        assert sorted(running.hub.broker.peers) == ["p0", "p2"]
        (removed,) = events_of(run_config, PeerLeft)
        assert (removed.peer, removed.cause) == ("p1", "accused")
        assert removed.reason in running.printed
        again = first.submit("next", next_request(running, left_generation=2, accusation=other), seconds=PATIENCE)
        assert again.result(PATIENCE)
        assert "p2" in running.hub.broker.peers, "nobody is removed for the same step again"


def test_accusers_are_answered_although_the_broker_cannot_remove_the_accused(run_config, monkeypatch):
    names = ("p0", "p1", "p2")
    bad = Accusation(name="p1", step=7, what="state over boundary 0 is not finite")

    def fail(_name):
        raise BrokerError("nats-server is frozen")

    with running_hub(run_config, names, patience_seconds=1.0) as running, ExitStack() as posts:
        first, second, third = (posts.enter_context(running.connection(name)) for name in names)
        begin_generation(running, first, second, third)
        monkeypatch.setattr(running.hub.broker, "remove_peer", fail)
        asked = [
            connection.submit("next", next_request(running, left_generation=1, accusation=bad), seconds=20)
            for connection in (first, third)
        ]
        answers = [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]
        assert all(isinstance(answer, Assignment | Standby) for answer in answers), answers
        assert any("p1" in line and "nats-server is frozen" in line for line in running.printed)
        assert running.hub.generations.expelling == set(), "p1 may ask again, and is known to be there still"
