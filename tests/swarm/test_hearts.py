"""Who is alive, by the clock of the hub."""

from thinpipe.swarm.hearts import Hearts


def test_who_is_silent_is_lost_once():
    hearts = Hearts(lost_after=10)
    hearts.beat("a", 0.0)
    hearts.beat("b", 5.0)
    assert list(hearts.newly_lost(9.0)) == []
    assert list(hearts.newly_lost(11.0)) == ["a"]
    assert list(hearts.newly_lost(12.0)) == []


def test_nobody_is_lost_because_the_hub_slept():
    hearts = Hearts(lost_after=10)
    hearts.beat("a", 0.0)
    hearts.excuse(100.0)
    assert list(hearts.newly_lost(101.0)) == []
    assert list(hearts.newly_lost(111.0)) == ["a"]
