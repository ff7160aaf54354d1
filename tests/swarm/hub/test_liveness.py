"""Who is alive, by the clock of the hub."""

from thinpipe.swarm.hub.liveness import Heartbeats


def test_who_is_silent_is_lost_once():
    heartbeats = Heartbeats(timeout_seconds=10)
    heartbeats.on_heartbeat("a", 0.0)
    heartbeats.on_heartbeat("b", 5.0)
    assert list(heartbeats.newly_timed_out(9.0)) == []
    assert list(heartbeats.newly_timed_out(11.0)) == [("a", 11.0)]
    assert list(heartbeats.newly_timed_out(12.0)) == []


def test_nobody_is_lost_because_the_hub_slept():
    heartbeats = Heartbeats(timeout_seconds=10)
    heartbeats.on_heartbeat("a", 0.0)
    heartbeats.extend_deadlines(100.0)
    assert list(heartbeats.newly_timed_out(101.0)) == []
    assert list(heartbeats.newly_timed_out(111.0)) == [("a", 11.0)]
