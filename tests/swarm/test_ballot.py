"""All are told the same, however often they ask and in whatever order; nothing else than the open round is taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.swarm.ballot import MOST_NUMBERS, Ballot, VoteError

NAMES = ("a", "b", "c")


def numbers(*values):
    return np.array(values, dtype=np.float64)


@settings(max_examples=300, deadline=None)
@given(asks=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=60))
def test_everybody_is_told_the_same_in_every_round(asks):
    """Each ask may be repeated; a peer goes on to the next round only when it was told."""
    ballot, at, told = Ballot(1, NAMES), dict.fromkeys(NAMES, 1), {}
    for name, heard in asks:
        ballot.give(name, 1, at[name], "sum", numbers(at[name], NAMES.index(name)))
        found = ballot.decision(at[name])
        if found is not None:
            assert told.setdefault(at[name], found.tolist()) == found.tolist() == [3 * at[name], 3]
            at[name] += heard  # else the answer was lost, and it asks again
    assert max(at.values()) - min(at.values()) <= 1


def test_what_is_not_a_number_is_seen_by_all():
    for kind in ("sum", "largest"):
        ballot = Ballot(1, NAMES)
        for name, value in zip(NAMES, (1.0, np.nan, 2.0), strict=True):
            ballot.give(name, 1, 1, kind, numbers(value))
        assert np.isnan(ballot.decision(1)).all()


def test_the_largest_of_all():
    ballot = Ballot(1, NAMES)
    for name, value in zip(NAMES, (1.0, 7.0, 2.0), strict=True):
        ballot.give(name, 1, 1, "largest", numbers(value, -value))
    assert ballot.decision(1).tolist() == [7.0, -1.0]


@pytest.mark.parametrize(
    ("vote", "message"),
    [
        (("d", 1, 1, "sum", numbers(1)), "d is not of epoch 1"),
        (("b", 2, 1, "sum", numbers(1)), "b is not of epoch 1"),
        (("b", 1, 2, "sum", numbers(1)), "b gives round 2 where 1 is open"),
        (("b", 1, 0, "sum", numbers(1)), "b gives round 0 where 1 is open"),
        (("b", 1, 1, "largest", numbers(1)), "b gives 1 numbers for a largest in round 1, and a 1 for a sum"),
        (("b", 1, 1, "sum", numbers(1, 2)), "b gives 2 numbers"),
    ],
)
def test_anything_else_is_refused(vote, message):
    ballot = Ballot(1, NAMES)
    ballot.give("a", 1, 1, "sum", numbers(1))
    with pytest.raises(VoteError, match=message):
        ballot.give(*vote)
    for name in ("b", "c"):
        assert ballot.decision(1) is None
        ballot.give(name, 1, 1, "sum", numbers(1))
    assert ballot.decision(1).tolist() == [3], "nothing of it was counted"


def test_nobody_changes_a_vote():
    ballot = Ballot(1, ("a", "b"))
    ballot.give("a", 1, 1, "sum", numbers(1))
    ballot.give("a", 1, 1, "sum", numbers(100))
    ballot.give("b", 1, 1, "sum", numbers(10))
    assert ballot.decision(1).tolist() == [11]


def test_too_much_and_too_long_ago():
    ballot = Ballot(1, ("a",))
    with pytest.raises(VoteError, match="more than"):
        ballot.give("a", 1, 1, "sum", np.zeros(MOST_NUMBERS + 1))
    for number in range(1, 5):
        ballot.give("a", 1, number, "sum", numbers(number))
    assert [ballot.decision(number) is None for number in range(1, 5)] == [True, True, False, False]
    with pytest.raises(VoteError, match="round 1 where 5 is open"):
        ballot.give("a", 1, 1, "sum", numbers(1))
