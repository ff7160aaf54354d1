"""Budgets of peers: rates and bursts, whose turn it is, what is dropped, when a flood is named."""

import math
from dataclasses import replace

import pytest

from thinpipe.swarm.hub.services.budgets import BUDGETS, Bucket, Priority
from thinpipe.swarm.hub.services.fair_queue import MAX_BULK_AT_ONCE, MAX_HELD_NBYTES, FairQueue, Request
from thinpipe.swarm.hub.services.floods import MAX_DROPPED, PROBATION_LIMIT, Floods
from thinpipe.transport.nats.connection import HEARTBEAT_SECONDS

SMALL = replace(
    BUDGETS["status"], per_second=10, nbytes_per_second=1000, burst_seconds=2, max_nbytes=100, max_unanswered=5
)


def request(peer="p0", service="a", nbytes=10):
    return Request(peer, service, bytes(nbytes), "")


def started(queue, now, limit=1000):
    """Requests that start now, in order."""
    found = []
    while len(found) < limit and (one := queue.start(now)) is not None:
        found.append(one)
    return found


def test_a_burst_is_free_and_the_rate_holds_in_the_long_run():
    bucket, now, taken = Bucket(SMALL), 1000.0, 0
    while now < 1100:
        if not bucket.wait_seconds(now):
            bucket.charge(now, requests=1)
            taken += 1
        else:
            now += bucket.wait_seconds(now)
    assert taken == pytest.approx(10 * (100 + 2), abs=2)


def test_bytes_cost_as_much_as_requests():
    bucket = Bucket(SMALL)
    bucket.charge(50.0, nbytes=5000)
    assert bucket.wait_seconds(50.0) == pytest.approx(5000 / 1000 - 2)
    assert bucket.wait_seconds(53.0) == 0


def test_unused_time_is_not_saved_beyond_the_burst():
    bucket = Bucket(SMALL)
    bucket.charge(1e6, requests=21)
    assert bucket.wait_seconds(1e6) == pytest.approx(0.1)


def test_urgent_requests_start_first_and_peers_take_turns():
    queue = FairQueue({"files": replace(SMALL, priority=Priority.BULK), "a": SMALL, "vote": replace(SMALL, priority=0)})
    for _ in range(5):
        for each in (request("p0", "files"), request("p0"), request("p0", "vote")):
            assert not queue.arrive(each)
    for each in (request("p1"), request("p1", "vote")):
        assert not queue.arrive(each)
    order = [(each.service, each.peer) for each in started(queue, 0.0)]
    assert order[:3] == [("vote", "p0"), ("vote", "p1"), ("vote", "p0")]
    assert order[6:8] == [("a", "p0"), ("a", "p1")]
    assert [service for service, _ in order] == ["vote"] * 6 + ["a"] * 6 + ["files"] * 5


def test_a_peer_beyond_its_budget_waits_and_the_others_do_not():
    queue = FairQueue({"a": replace(SMALL, max_unanswered=100)})
    for _ in range(30):
        queue.arrive(request("p0"))
    assert len(started(queue, 0.0)) == 19  # each costs 0.11 s, and 2 s are saved
    queue.arrive(request("p1"))
    assert [each.peer for each in started(queue, 0.0)] == ["p1"]
    assert queue.wait_seconds(0.0) == pytest.approx(19 * 0.11 - 2)


@pytest.mark.parametrize(("nbytes", "number"), [(101, 0), (100, 5)])
def test_what_is_too_long_or_too_much_is_dropped(nbytes, number):
    queue = FairQueue({"a": SMALL})
    assert [bool(queue.arrive(request(nbytes=nbytes))) for _ in range(8)] == [False] * number + [True] * (8 - number)


def test_running_requests_count_until_they_are_done():
    queue = FairQueue({"a": SMALL})
    for _ in range(5):
        queue.arrive(request())
    (*_, last) = started(queue, 0.0)
    assert queue.arrive(request())
    queue.done(last, 0, 0.0)
    assert not queue.arrive(request())
    assert queue.held_nbytes == 50


def test_bulk_requests_leave_room_for_others():
    queue = FairQueue({"a": replace(SMALL, priority=Priority.BULK), "b": SMALL})
    for peer in range(2 * MAX_BULK_AT_ONCE):
        queue.arrive(request(f"p{peer}"))
    running = started(queue, 0.0)
    assert len(running) == MAX_BULK_AT_ONCE
    queue.arrive(request(service="b"))
    assert [each.service for each in started(queue, 0.0)] == ["b"]
    queue.done(running[0], 0, 0.0)
    assert len(started(queue, 0.0)) == 1


def test_memory_is_bounded_and_shared():
    """Many flooders cannot keep an honest peer from being served, and take little more than one."""
    budget = replace(BUDGETS["write_file"], nbytes_per_second=1.0, burst_seconds=0)
    queue = FairQueue({"a": budget})
    for flooder in range(100):
        while not queue.arrive(request(f"f{flooder}", nbytes=1 << 20)):
            pass
    assert queue.held_nbytes < MAX_HELD_NBYTES * (1 + math.log(100))
    assert not queue.arrive(request("honest", nbytes=1 << 20))


def test_who_is_forgotten_holds_nothing():
    queue = FairQueue({"a": SMALL})
    for _ in range(5):
        queue.arrive(request())
    (first,) = started(queue, 0.0, limit=1)
    queue.forget("p0")
    assert not started(queue, 0.0)
    queue.done(first, 0, 0.0)
    assert queue.held_nbytes == 0


def dropped(floods, now, number=MAX_DROPPED, service="next"):
    return [floods.on_dropped("p0", service, 10, now) for _ in range(number)]


def test_a_few_dropped_requests_are_no_flood():
    floods = Floods()
    assert set(dropped(floods, 0.0, MAX_DROPPED - 1)) == {None}
    assert not floods.in_words(0.0)


def test_who_goes_on_after_a_pause_is_named_once_with_figures():
    floods, now, pauses = Floods(), 0.0, []
    for _ in range(8):
        (seconds,) = set(dropped(floods, now)) - {None}
        pauses.append(seconds)
        if len(pauses) == 1:
            assert not floods.name("p0", "next", now), "what has piled up while the hub was suspended is no flood"
        if len(pauses) == 2:
            assert f"p0 floods the hub: {3 * MAX_DROPPED} requests too many (480 B)" in floods.name("p0", "next", now)
        assert floods.is_paused("p0", "next", now)
        assert set(dropped(floods, now)) == {None}, "what was under way"
        now += seconds + 0.1
    assert pauses == [1, 2, 4, 8, 16, 32, 32, 32]
    assert not floods.name("p0", "next", now)
    assert floods.in_words(now)
    assert floods.on_probation("p0", "next", now)
    assert not floods.on_probation("p0", "next", now + 60)
    assert not floods.in_words(now + 60)


def test_heartbeats_come_through_before_their_peer_counts_as_lost():
    floods, now = Floods(), 0.0
    for _ in range(8):
        (seconds,) = set(dropped(floods, now, service="heartbeat")) - {None}
        assert seconds <= 4
        now += seconds + 0.1


def test_an_honest_peer_is_far_below_its_budgets():
    """Heartbeats after two minutes without a link, the bandwidth probe, and uploads with all that may be under way."""
    queue = FairQueue(BUDGETS)
    assert not any(queue.arrive(request(service="heartbeat", nbytes=300)) for _ in range(int(120 / HEARTBEAT_SECONDS)))
    assert not any(queue.arrive(request(service="probe", nbytes=(256 << 10) + 50)) for _ in range(65))
    assert not any(queue.arrive(request(service="write_file", nbytes=(256 << 10) + 600)) for _ in range(32))
    assert PROBATION_LIMIT * (8 << 20) < 256 << 20, "the server holds no more for the hub"
    assert all(budget.max_pending * budget.max_nbytes <= 128 << 20 for budget in BUDGETS.values())
