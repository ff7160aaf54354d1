"""Who stands still although its heart beats, and who only waits."""

import asyncio
import threading
import time
from contextlib import closing

from tests.swarm.brokers import running_broker
from tests.transport.nats_peers import address, hub_services
from thinpipe.swarm.progress import Watch
from thinpipe.transport.nats.post import Post
from thinpipe.transport.nats.progress import Beat, Progress


def watch(*names, now=0.0, epoch=1):
    found = Watch(factor=4, floor=10, start=300)
    found.begin(epoch, dict.fromkeys(names, 1), now)
    return found


def beat(quiet_s=0.0, *, epoch=1, marks=1, waits_for="", steps=5, stepping=True):
    return Beat(epoch=epoch, marks=marks, quiet_s=quiet_s, waits_for=waits_for, steps=steps, stepping=stepping)


def names(found):
    return [still.name for still in found]


def test_who_computes_nothing_for_long_is_to_blame_and_who_waits_for_it_is_not():
    watched = watch("a", "b", "c")
    for name in "abc":
        watched.beat(name, beat())
    watched.beat("a", beat(10.5))
    watched.beat("b", beat(10.5, waits_for="a"))
    watched.beat("c", beat(200.0, waits_for="hub"))
    (still,) = watched.still(11.0)
    assert still.words == ("a is lost: its heart beats, but it has computed nothing for 10 s (deadline 10 s)"), (
        "the floor, for who was never seen to need any time"
    )
    watched.gone("a")
    assert not watched.still(11.0)


def test_who_does_not_come_out_of_an_epoch_that_is_over_is_to_blame_too():
    watched = watch("a", "b")
    for name in "ab":
        watched.beat(name, beat())
    watched.end()
    watched.beat("a", beat(10.5))
    watched.beat("b", beat(10.5, epoch=0))
    assert names(watched.still(11.0)) == ["a"]
    watched.begin(2, {"b": 1}, 20.0)
    assert not watched.still(21.0)


def test_the_deadline_is_some_times_the_longest_that_was_needed():
    watched = watch("a")
    watched.beat("a", beat(5.0, marks=1))
    watched.beat("a", beat(0.2, marks=2))
    watched.beat("a", beat(19.0, marks=2))
    assert not watched.still(30.0)
    watched.beat("a", beat(20.5, marks=2))
    assert [(still.seconds, still.deadline) for still in watched.still(30.0)] == [(20.5, 20.0)]


def test_first_steps_and_what_is_no_step_have_the_generous_deadline():
    for kept in (beat(250.0, steps=0), beat(250.0, steps=1), beat(250.0, stepping=False)):
        watched = watch("a")
        watched.beat("a", kept)
        assert not watched.still(0.0)
        watched.beat("a", Beat(**{field: getattr(kept, field) for field in kept.__struct_fields__} | {"quiet_s": 301}))
        assert names(watched.still(0.0)) == ["a"]


def test_times_of_saving_and_of_the_first_step_are_no_measure():
    watched = watch("a")
    watched.beat("a", beat(100.0, marks=1, steps=0))
    watched.beat("a", beat(100.0, marks=2, stepping=False))
    watched.beat("a", beat(100.0, marks=3, waits_for="b"))
    watched.beat("a", beat(10.5, marks=4))
    assert names(watched.still(0.0)) == ["a"]


def test_what_was_measured_holds_in_the_next_epoch_for_as_many_segments():
    watched = watch("a")
    watched.beat("a", beat())
    watched.begin(2, {"a": 1}, 50.0)
    watched.beat("a", beat(12.0, epoch=2, steps=1))
    assert names(watched.still(0.0)) == ["a"]
    watched.begin(3, {"a": 2}, 50.0)
    watched.beat("a", beat(12.0, epoch=3, steps=1))
    assert not watched.still(0.0)


def test_beats_of_another_epoch_and_of_strangers_mean_nothing():
    watched = watch("a", epoch=2)
    watched.beat("a", beat(1000.0, epoch=1))
    watched.beat("b", beat(1000.0, epoch=2))
    watched.beat("a", Beat())
    assert not watched.still(299.0)
    assert names(watched.still(301.0)) == ["a"], "who was told to begin and does not"
    watched.excuse(100.0)
    assert not watched.still(399.0)


def test_a_circle_has_nobody_to_blame():
    watched = watch("a", "b")
    watched.beat("a", beat(400.0, waits_for="b"))
    assert watched.circle() is None
    watched.beat("b", beat(301.0, waits_for="hub"))
    assert watched.circle() == 301.0
    assert not watched.still(1000.0)


def test_a_process_tells_for_whom_it_waits_until_that_is_there():
    progress, there = Progress(), threading.Event()
    assert progress.beat() == Beat()
    progress.begin(7)
    with progress.step(), progress.waiting("b", there.is_set):
        time.sleep(0.2)
        first = progress.beat()
        assert (first.epoch, first.waits_for, first.stepping, first.steps) == (7, "b", True, 0)
        assert first.quiet_s >= 0.2
        there.set()
        second = progress.beat()
        assert (second.waits_for, second.marks) == ("", first.marks + 1), "it has come, whether we have noticed or not"
    after = progress.beat()
    assert (after.waits_for, after.stepping, after.steps) == ("", False, 1)
    assert after.marks > first.marks
    other = threading.Thread(target=progress.mark)
    other.start()
    other.join()
    assert progress.beat().marks == after.marks, "one thread computes, what others do is no progress"
    progress.end()
    assert progress.beat() == Beat()


def test_who_asks_the_hub_says_so(tmp_path):
    told, go_on = [], threading.Event()

    async def slow(_peer, _data):
        await asyncio.to_thread(go_on.wait, 300)
        return b"answer"

    with running_broker(tmp_path) as running, hub_services(running, slow=slow):
        post = Post(address(running, "p0"))
        with closing(post):

            def look():
                while not post.progress.beat().waits_for:
                    time.sleep(0.01)
                told.append(post.progress.beat())
                go_on.set()

            post.progress.begin(3)
            looking = threading.Thread(target=look)
            looking.start()
            assert post.request("slow", b"", seconds=300) == b"answer"
            looking.join()
            assert [(each.epoch, each.waits_for) for each in told] == [(3, "hub")]
            assert post.progress.beat().waits_for == ""
