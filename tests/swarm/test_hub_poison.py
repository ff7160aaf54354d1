"""A peer that sends bad values: once, and the step is computed again; twice, and it is suspended."""

import json
import re
import signal
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np
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
from thinpipe.core.events import Retried, Saved, Skipped, Stopped
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted, PeerLeft, PeerResumed, PeerSuspended
from thinpipe.swarm.broker.broker import BrokerError
from thinpipe.swarm.peer.join import EXIT_TEMPFAIL
from thinpipe.swarm.protocol.messages import Accusation, Answer, Assignment, Standby
from thinpipe.swarm.protocol.reduction import ReduceReply, ReduceRequest

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


def test_a_peer_that_is_bad_once_stays_and_one_that_is_bad_twice_is_suspended(run_config, programs, tmp_path):
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
    suspended = wait_for_event(run_host, PeerSuspended, peer=twice)
    assert re.search(rf"{suspended.by} says that {twice} sent bad values twice in step \d+ \(", suspended.reason)
    ended = wait_for_event(run_host, GenerationEnded, generation=1)
    assert (ended.cause, ended.peer) == ("accused", twice)
    peers[twice].until(f"{twice} is suspended for a while: {suspended.by} says")
    wait_for_event(run_host, Saved, after=wait_for_event(run_host, GenerationStarted, generation=2))
    hub.process.send_signal(signal.SIGTERM)
    assert hub.finish() == 0, hub.printed
    assert [peer.finish() for peer in peers.values()] == [EXIT_TEMPFAIL] * 4
    assert {event.cause for event in events_of(run_host, PeerLeft)} == {"left"}, "at the end"

    injected = {name: [each.place for each in read_injections(tmp_path / f"{name}.log")] for name in peers}
    assert {name: len(places) for name, places in injected.items() if places} == {once: 1, twice: 2}
    told = [(event.step, event.boundary, event.forward, event.sender) for event in events(run_host, Retried)]
    assert told == [(p.step, p.boundary, p.forward, n) for n in (once, twice) for p in injected[n][:1]]
    assert events(run_host, Skipped) == []
    last = newest_step(run_host)
    assert {step.step for step in steps_of(run_host)} >= set(range(1, last + 1))
    train_until(run_config, last)
    assert files_of(run_host, last) == files_of(run_config, last)


@pytest.mark.long
def test_a_run_that_has_diverged_stops_and_costs_nobody_its_place(run_config, programs, tmp_path):
    """Whoever has the first segment sends bad values from step 10 on, on any machine: it is the run itself."""
    config = replace(run_config, checkpoint=CheckpointConfig(interval=4, keep_latest_k=2))
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(config))
    hub = start_hub(programs, file, 3, "--hub.patience-seconds", 2)
    plan = json.dumps([[step, 0, True, 100, "nan"] for step in range(10, 60)])
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
    assert "accused" not in [event.cause for event in events_of(config, PeerLeft)]
    assert [peer.finish() for peer in peers] == [0, 0, 0]
    assert [event.step for event in events(config, Skipped)] == [10, 11, 12]
    suspended = [event.peer for event in events_of(config, PeerSuspended)]
    assert {event.peer for event in events_of(config, PeerResumed)} == set(suspended), "they were not to blame"
    assert events_of(config, GenerationEnded)[-1].cause == "not_finite"


NAMES = ("p0", "p1", "p2")
FIRST_CUT = (0, True)
"""What p0 sends to p1."""


def step_layout(running):
    """Of the running generation."""
    return running.hub.generations.replicas[0].conduct.record.layout


def compute(running, connections, round_number, generation=1, **of_one):
    """One attempt at a step by hand. `of_one`: by name, in what its contribution differs."""
    layout = step_layout(running)
    asked = [
        connection.submit(
            "reduce",
            msgspec.msgpack.encode(
                ReduceRequest(
                    generation=generation,
                    round_number=round_number,
                    op="step",
                    values=honest_vector(layout, rank, **of_one.get(name, {})).tobytes(),
                )
            ),
            seconds=PATIENCE,
        )
        for rank, (name, connection) in enumerate(zip(NAMES, connections, strict=False))
    ]
    replies = [msgspec.msgpack.decode(each.result(PATIENCE), type=ReduceReply) for each in asked]
    assert [reply.refusal for reply in replies] == [""] * len(replies)


def honest_vector(layout, rank, *, bad=()):
    return np.array(
        layout.vector.pack(
            loss=2.0 if layout.process_of_segment[-1] == rank else 0.0,
            stops=0.0,
            gradient_norms={},
            of_ends={"not_finite": dict.fromkeys(bad, 1.0)},
            of_process={"seconds": 1.0},
            rank=rank,
        )
    )


def accuse(running, connections, generation, **fields):
    """All ask what to do next, with what they report."""
    asked = [
        connection.submit("next", next_request(running, left_generation=generation, **fields), seconds=PATIENCE)
        for connection in connections
    ]
    return [msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for each in asked]


def test_all_that_accuse_a_peer_have_heard_it_from_one_so_it_is_suspended_and_keeps_its_key(run_config):
    """Peers driven by hand."""
    bad = Accusation(name="p0", step=2, what="state over boundary 0 is not finite")
    with running_hub(run_config, NAMES, patience_seconds=2.0) as running, ExitStack() as posts:
        connections = [posts.enter_context(running.connection(name)) for name in NAMES]
        assert [work.diverged_steps for work in begin_generation(running, *connections)] == [[], [], []]
        compute(running, connections, 1)
        for round_number in (2, 3):
            compute(running, connections, round_number, p1={"bad": [FIRST_CUT]})
        work = [each for each in accuse(running, connections, 1, accusation=bad) if isinstance(each, Assignment)]
        assert {(each.generation, tuple(sorted(each.names))) for each in work} == {(2, ("p1", "p2"))}
        assert sorted(running.hub.broker.peers) == sorted(NAMES)
        (suspended,) = events_of(run_config, PeerSuspended)
        assert (suspended.peer, suspended.by) == ("p0", "p1")
        assert running.hub.status().suspended["p0"].endswith(suspended.reason)
        assert any("p0 is suspended for 5 min" in line and "thinpipe kick" in line for line in running.printed)


def test_what_a_peer_says_of_a_step_that_no_sum_shows_removes_and_suspends_nobody(run_config):
    with running_hub(run_config, NAMES, patience_seconds=2.0) as running, ExitStack() as posts:
        connections = [posts.enter_context(running.connection(name)) for name in NAMES]
        begin_generation(running, *connections)
        for step in (1, 1000):
            bad = Accusation(name="p1", step=step, what="state over boundary 0 is not finite")
            accuse(running, connections, running.hub.membership.last_generation, accusation=bad)
        assert sorted(running.hub.broker.peers) == sorted(NAMES)
        assert events_of(run_config, PeerLeft) == events_of(run_config, PeerSuspended) == []


def test_the_others_are_answered_although_the_broker_cannot_remove_a_peer(run_config, monkeypatch):
    """Two have found the same peer bad, in different steps."""

    def fail(_name):
        raise BrokerError("nats-server is frozen")

    with running_hub(run_config, NAMES, patience_seconds=1.0) as running, ExitStack() as posts:
        connections = [posts.enter_context(running.connection(name)) for name in NAMES]
        begin_generation(running, *connections)
        running.hub.generations.suspects._finders["p0"] = {"p2": 100}
        running.hub.generations.suspects._pair("p0", "p2")
        monkeypatch.setattr(running.hub.broker, "remove_peer", fail)
        for round_number in (1, 2):
            compute(running, connections, round_number, p1={"bad": [FIRST_CUT]})
        answers = accuse(running, connections[1:], 1)
        assert all(isinstance(answer, Assignment | Standby) for answer in answers), answers
        assert any("p0" in line and "nats-server is frozen" in line for line in running.printed)
        assert [event.peer for event in events_of(run_config, PeerLeft)] == ["p0"]
        assert running.hub.generations.expelling == set(), "p0 may ask again, and is known to be there still"
