"""Who stands still although its heart beats, and who only waits."""

import asyncio
import threading
import time
from contextlib import closing

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import address, hub_services
from thinpipe.swarm.hub.stalls import StallDetector
from thinpipe.transport.nats.activity import ActivityTracker, Heartbeat
from thinpipe.transport.nats.connection import HubConnection


def watch(*names, now=0.0, generation=1):
    found = StallDetector(factor=4, floor_seconds=10, startup_seconds=300)
    found.begin(generation, dict.fromkeys(names, 1), now)
    return found


def heartbeat(idle_s=0.0, *, generation=1, n_actions=1, waits_for="", steps=5, in_step=True):
    return Heartbeat(
        generation=generation, n_actions=n_actions, idle_s=idle_s, waits_for=waits_for, steps=steps, in_step=in_step
    )


def names(found):
    return [stalled.name for stalled in found]


def test_who_computes_nothing_for_long_is_to_blame_and_who_waits_for_it_is_not():
    watched = watch("a", "b", "c")
    for name in "abc":
        watched.on_heartbeat(name, heartbeat())
    watched.on_heartbeat("a", heartbeat(10.5))
    watched.on_heartbeat("b", heartbeat(10.5, waits_for="a"))
    watched.on_heartbeat("c", heartbeat(200.0, waits_for="hub"))
    (stalled,) = watched.stalled(11.0)
    assert stalled.message == "it sends heartbeats, but has computed nothing for 10 s, and its deadline is 10 s", (
        "the floor, for who was never seen to need any time"
    )
    watched.drop_peer("a")
    assert not watched.stalled(11.0)


def test_who_does_not_come_out_of_a_generation_that_is_over_is_to_blame_too():
    watched = watch("a", "b")
    for name in "ab":
        watched.on_heartbeat(name, heartbeat())
    watched.end()
    watched.on_heartbeat("a", heartbeat(10.5))
    watched.on_heartbeat("b", heartbeat(10.5, generation=0))
    assert names(watched.stalled(11.0)) == ["a"]
    watched.begin(2, {"b": 1}, 20.0)
    assert not watched.stalled(21.0)


def test_the_deadline_is_some_times_the_longest_that_was_needed():
    watched = watch("a")
    watched.on_heartbeat("a", heartbeat(5.0, n_actions=1))
    watched.on_heartbeat("a", heartbeat(0.2, n_actions=2))
    watched.on_heartbeat("a", heartbeat(19.0, n_actions=2))
    assert not watched.stalled(30.0)
    watched.on_heartbeat("a", heartbeat(20.5, n_actions=2))
    assert [(stalled.seconds, stalled.deadline) for stalled in watched.stalled(30.0)] == [(20.5, 20.0)]


def test_first_steps_and_what_is_no_step_have_the_generous_deadline():
    for kept in (heartbeat(250.0, steps=0), heartbeat(250.0, steps=1), heartbeat(250.0, in_step=False)):
        watched = watch("a")
        watched.on_heartbeat("a", kept)
        assert not watched.stalled(0.0)
        watched.on_heartbeat(
            "a", Heartbeat(**{field: getattr(kept, field) for field in kept.__struct_fields__} | {"idle_s": 301})
        )
        assert names(watched.stalled(0.0)) == ["a"]


def test_times_of_saving_and_of_the_first_step_are_no_measure():
    watched = watch("a")
    watched.on_heartbeat("a", heartbeat(100.0, n_actions=1, steps=0))
    watched.on_heartbeat("a", heartbeat(100.0, n_actions=2, in_step=False))
    watched.on_heartbeat("a", heartbeat(100.0, n_actions=3, waits_for="b"))
    watched.on_heartbeat("a", heartbeat(10.5, n_actions=4))
    assert names(watched.stalled(0.0)) == ["a"]


def test_what_was_measured_holds_in_the_next_generation_for_as_many_segments():
    watched = watch("a")
    watched.on_heartbeat("a", heartbeat())
    watched.begin(2, {"a": 1}, 50.0)
    watched.on_heartbeat("a", heartbeat(12.0, generation=2, steps=1))
    assert names(watched.stalled(0.0)) == ["a"]
    watched.begin(3, {"a": 2}, 50.0)
    watched.on_heartbeat("a", heartbeat(12.0, generation=3, steps=1))
    assert not watched.stalled(0.0)


def test_heartbeats_of_another_generation_and_of_strangers_mean_nothing():
    watched = watch("a", generation=2)
    watched.on_heartbeat("a", heartbeat(1000.0, generation=1))
    watched.on_heartbeat("b", heartbeat(1000.0, generation=2))
    watched.on_heartbeat("a", Heartbeat())
    assert not watched.stalled(299.0)
    assert names(watched.stalled(301.0)) == ["a"], "who was told to begin and does not"
    watched.extend_deadlines(100.0)
    assert not watched.stalled(399.0)


def test_a_circle_has_nobody_to_blame():
    watched = watch("a", "b")
    watched.on_heartbeat("a", heartbeat(400.0, waits_for="b"))
    assert watched.deadlock_seconds() is None
    watched.on_heartbeat("b", heartbeat(301.0, waits_for="hub"))
    assert watched.deadlock_seconds() == 301.0
    assert not watched.stalled(1000.0)


def test_a_process_tells_for_whom_it_waits_until_that_is_there():
    activity, there = ActivityTracker(), threading.Event()
    assert activity.heartbeat() == Heartbeat()
    activity.begin(7)
    with activity.step(), activity.waiting("b", there.is_set):
        time.sleep(0.2)
        first = activity.heartbeat()
        assert (first.generation, first.waits_for, first.in_step, first.steps) == (7, "b", True, 0)
        assert first.idle_s >= 0.2
        there.set()
        second = activity.heartbeat()
        assert (second.waits_for, second.n_actions) == ("", first.n_actions + 1), (
            "it has come, whether we have noticed or not"
        )
    after = activity.heartbeat()
    assert (after.waits_for, after.in_step, after.steps) == ("", False, 1)
    assert after.n_actions > first.n_actions
    other = threading.Thread(target=activity.record_action)
    other.start()
    other.join()
    assert activity.heartbeat().n_actions == after.n_actions, "one thread computes, what others do is no progress"
    activity.end()
    assert activity.heartbeat() == Heartbeat()


def test_who_asks_the_hub_says_so(tmp_path):
    told, go_on = [], threading.Event()

    async def slow(_peer, _data):
        await asyncio.to_thread(go_on.wait, 300)
        return b"answer"

    with running_broker(tmp_path) as running, hub_services(running, slow=slow):
        connection = HubConnection(address(running, "p0"))
        with closing(connection):

            def look():
                while not connection.activity.heartbeat().waits_for:
                    time.sleep(0.01)
                told.append(connection.activity.heartbeat())
                go_on.set()

            connection.activity.begin(3)
            looking = threading.Thread(target=look)
            looking.start()
            assert connection.request("slow", b"", seconds=300) == b"answer"
            looking.join()
            assert [(each.generation, each.waits_for) for each in told] == [(3, "hub")]
            assert connection.activity.heartbeat().waits_for == ""
