"""Half of the others are enough to remove a peer, once for a step and those near it."""

import pytest

from thinpipe.swarm.hub.accusations import Accusations
from thinpipe.swarm.protocol.messages import Accusation

NAMES = ["a", "b", "c", "d"]


def of(name, step=7, what="state over boundary 1 is not finite"):
    return Accusation(name=name, step=step, what=what)


def test_half_of_the_others_must_say_the_same():
    accusations = Accusations()
    assert not accusations.add("a", of("d"), 1, NAMES)
    assert not accusations.add("a", of("d"), 1, NAMES), "nobody counts twice"
    assert not accusations.add("b", of("d", step=8), 1, NAMES), "another step is another thing"
    assert accusations.steps == []
    assert accusations.add("c", of("d"), 1, NAMES)
    assert accusations.steps == [7]


def test_of_two_the_other_is_believed():
    assert Accusations().add("a", of("b"), 1, ["a", "b"])


def test_what_one_says_of_itself_or_of_strangers_and_what_strangers_say_counts_for_nothing():
    accusations = Accusations()
    assert not accusations.add("d", of("d"), 1, ["c", "d"])
    assert not accusations.add("x", of("d"), 1, ["c", "d"])
    assert not accusations.add("c", of("x"), 1, ["c", "d"])


def test_accusations_of_one_generation_do_not_count_in_another():
    accusations = Accusations()
    accusations.add("a", of("d"), 1, NAMES)
    assert not accusations.add("b", of("d"), 2, NAMES)


@pytest.mark.parametrize("step", [5, 6, 7, 8, 9])
def test_nobody_is_removed_for_the_same_step_again_or_for_one_near_it(step):
    """A run that has diverged may be computed on from a commit between two bad steps, and by other processors."""
    accusations = Accusations()
    assert accusations.add("a", of("b"), 1, ["a", "b"])
    assert not accusations.add("a", of("c", step=step), 2, ["a", "c"])
    assert accusations.add("a", of("c", step=10), 2, ["a", "c"])
