"""Leases: every batch is counted once, whoever is lost, late or slow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.rounds.leases import Leases, batches, count, joined, take


def test_ranges_are_joined_and_nothing_is_there_twice():
    assert joined([range(4, 6), range(0, 2), range(2, 4), range(9, 9), range(7, 8)]) == (range(6), range(7, 8))
    with pytest.raises(ValueError, match="batch 1 is there twice"):
        joined([range(2), range(1, 3)])


def test_the_first_batches_are_taken_in_order():
    ranges = (range(2), range(5, 9))
    assert take(ranges, 3) == ((range(2), range(5, 6)), (range(6, 9),))
    assert take(ranges, 0) == ((), ranges)
    assert take(ranges, 99) == (ranges, ())


def test_what_was_not_done_is_leased_again_before_anything_new():
    leases = Leases(total=20)
    assert leases.lease(0, 4) == (range(4),)
    assert leases.lease(1, 4) == (range(4, 8),)
    assert leases.close({0: 4, 1: 1}) == {0: (range(4),), 1: (range(4, 5),)}
    assert leases.done == 5
    assert leases.lease(0, 4) == (range(5, 9),)
    leases.give_back(0)
    assert leases.lease(1, 2) == (range(5, 7),)


def test_at_the_end_of_the_run_leases_are_shorter():
    leases = Leases(total=5)
    assert count(leases.lease(0, 4)) == 4
    assert leases.lease(1, 4) == (range(4, 5),)
    assert leases.lease(2, 4) == ()
    leases.close({0: 4, 1: 1})
    assert (leases.done, leases.free) == (5, ())


def test_a_replica_cannot_have_done_more_than_it_was_given():
    leases = Leases(total=20)
    leases.lease(0, 4)
    for done in ({0: 5}, {0: -1}, {1: 1}):
        with pytest.raises(ValueError, match="has done"):
            leases.close(done)


actions = st.lists(
    st.tuples(st.sampled_from(["lease", "lose", "close"]), st.integers(0, 3), st.integers(0, 9)), max_size=60
)


@given(total=st.integers(0, 60), actions=actions)
def test_every_batch_is_counted_once(total, actions):
    leases, counted = Leases(total=total), []
    for what, replica, number in actions:
        if what == "lease":
            leases.lease(replica, number)
        elif what == "lose":
            leases.give_back(replica)
        else:
            done = {each: min(number, count(held)) for each, held in leases.held.items() if each >= replica}
            counted += [batch for ranges in leases.close(done).values() for batch in batches(ranges)]
        held = [batch for ranges in leases.held.values() for batch in batches(ranges)]
        assert sorted(counted + held + [*batches(leases.free)]) == [*range(total)]
        assert [*batches(leases.counted)] == sorted(counted)
    while leases.free or leases.held:
        leases.lease(0, 5)
        counted += [
            batch
            for ranges in leases.close({each: count(held) for each, held in leases.held.items()}).values()
            for batch in batches(ranges)
        ]
    assert sorted(counted) == [*range(total)]
