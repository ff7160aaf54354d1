"""Two replicas under one real hub: sums, rendezvous and ends of their generations do not meet."""

import msgspec
import numpy as np
import pytest

from tests.programs import PATIENCE, events_of
from tests.swarm.commits import wait_until
from tests.swarm.hubs import ask_again, ask_as, next_request, report, running_hub
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted
from thinpipe.swarm.protocol.messages import Answer, Assignment, LeaveReply, LeaveRequest, Standby
from thinpipe.swarm.protocol.reduction import ReduceReply, ReduceRequest
from thinpipe.swarm.protocol.status import Status
from thinpipe.transport.nats.store_messages import StoreReply, StoreRequest

NAMES = ("p0", "p1", "p2", "p3")


@pytest.fixture
def hub(run_config):
    with running_hub(run_config, NAMES, replicas=2) as running:
        yield running


@pytest.fixture
def pairs(hub):
    """Connections of both generations, each in pipeline order, with their assignments."""
    connections = {name: hub.connection(name) for name in NAMES}
    opened = {name: connection.__enter__() for name, connection in connections.items()}
    try:
        asked = {
            name: connection.submit("next", next_request(hub, report=report(1e9)), seconds=PATIENCE)
            for name, connection in opened.items()
        }
        answers = {name: msgspec.msgpack.decode(each.result(PATIENCE), type=Answer) for name, each in asked.items()}
        works = {
            name: ask_again(opened[name], hub) if isinstance(answer, Standby) else answer
            for name, answer in answers.items()
        }
        assert all(isinstance(work, Assignment) for work in works.values())
        of_generation = {work.generation: work for work in works.values()}
        assert sorted(of_generation) == [1, 2]
        yield [[opened[name] for name in of_generation[number].names] for number in (1, 2)]
    finally:
        for connection in connections.values():
            connection.__exit__(None, None, None)


def contribution(generation, number, value):
    values = np.array([value], "<f8").tobytes()
    return msgspec.msgpack.encode(ReduceRequest(generation=generation, round_number=number, op="sum", values=values))


def total(reply):
    answer = msgspec.msgpack.decode(reply.result(PATIENCE), type=ReduceReply)
    return answer.refusal or np.frombuffer(answer.values, "<f8").item()


def ask_store(connection, **request):
    return ask_as(connection, "store", StoreRequest(**request), StoreReply)


def test_sums_are_of_one_generation(pairs):
    values = [[1.0, 2.0], [10.0, 20.0]]
    asked = [
        connection.submit("reduce", contribution(number, 1, value), seconds=PATIENCE)
        for number, pair, mine in zip((1, 2), pairs, values, strict=True)
        for connection, value in zip(pair, mine, strict=True)
    ]
    assert [total(each) for each in asked] == [3.0, 3.0, 30.0, 30.0]


def test_a_peer_cannot_contribute_to_the_other_generation(pairs):
    foreign = pairs[0][0].submit("reduce", contribution(2, 1, 5.0), seconds=PATIENCE)
    assert "is not of generation 1" in total(foreign)


def test_keys_are_of_one_generation(pairs):
    assert ask_store(pairs[0][0], what="set", keys=["where"], value=b"here").found
    assert ask_store(pairs[0][1], what="get", keys=["where"], wait_seconds=0.0).value == b"here"
    assert not ask_store(pairs[1][0], what="get", keys=["where"], wait_seconds=0.0).found


def test_one_generation_ends_and_the_other_goes_on(pairs, run_config):
    (first, _), (third, fourth) = pairs
    waiting = third.submit("reduce", contribution(2, 1, 10.0), seconds=PATIENCE)
    assert ask_as(first, "leave", LeaveRequest(incarnation="a"), LeaveReply)
    wait_until(lambda: events_of(run_config, GenerationEnded))
    assert [event.generation for event in events_of(run_config, GenerationStarted)] == [1, 2]
    assert [event.generation for event in events_of(run_config, GenerationEnded)] == [1]
    answer = fourth.submit("reduce", contribution(2, 1, 20.0), seconds=PATIENCE)
    assert total(waiting) == total(answer) == 30.0
    left = pairs[0][1].submit("reduce", contribution(1, 1, 1.0), seconds=PATIENCE)
    assert "left" in total(left)
    status = ask_as(third, "status", 0, Status)
    assert {peer.name: peer.segments > 0 for peer in status.peers} == {
        fourth.address.name: True,
        third.address.name: True,
        pairs[0][1].address.name: False,
    }
