"""All are told the same, however often they ask and in whatever order; nothing else than the open round is taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.swarm.judged import SEGMENTS, layout
from thinpipe.swarm.hub.services.reduction import ReductionError, StepReduction
from thinpipe.swarm.hub.step_record import StepRecord
from thinpipe.swarm.protocol.reduction import MAX_VALUES
from thinpipe.transport.reduction import MAX_NBYTES

NAMES = ("a", "b", "c")


def record_of(names):
    return StepRecord(layout([SEGMENTS // len(names)] * len(names)), names, step=0)


def numbers(*values):
    return np.array(values, dtype=np.float64)


@settings(max_examples=300, deadline=None)
@given(asks=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=60))
def test_everybody_is_told_the_same_in_every_round(asks):
    """Each ask may be repeated; a peer goes on to the next round only when it was told."""
    reduction, at, told = StepReduction(1, NAMES), dict.fromkeys(NAMES, 1), {}
    for name, heard in asks:
        reduction.contribute(name, 1, at[name], "sum", numbers(at[name], NAMES.index(name)))
        found = reduction.result(at[name])
        if found is not None:
            assert told.setdefault(at[name], found.tolist()) == found.tolist() == [3 * at[name], 3]
            at[name] += heard  # else the answer was lost, and it asks again
    assert max(at.values()) - min(at.values()) <= 1


def test_what_is_not_a_number_is_seen_by_all():
    reduction = StepReduction(1, NAMES)
    for name, value in zip(NAMES, (1.0, np.nan, 2.0), strict=True):
        reduction.contribute(name, 1, 1, "sum", numbers(value))
    assert np.isnan(reduction.result(1)).all()


@pytest.mark.parametrize("count", [np.nan, np.inf, -1.0, MAX_NBYTES + 1.0])
def test_who_announces_bytes_that_cannot_be_is_refused_and_named(count):
    record = record_of(NAMES)
    reduction = StepReduction(1, NAMES, record)
    reduction.contribute("a", 1, 1, "counts", numbers(0, 5))
    with pytest.raises(ReductionError, match="b announces bytes"):
        reduction.contribute("b", 1, 1, "counts", numbers(count, 0))
    assert record.offence is not None
    assert record.offence[0] == "b"


def test_what_must_be_equal_and_is():
    reduction = StepReduction(1, NAMES)
    for name in NAMES:
        reduction.contribute(name, 1, 1, "equal", numbers(7.0, -1.0))
    assert reduction.result(1).tolist() == [7.0, -1.0]


@pytest.mark.parametrize("value", [7.5, np.nan])
def test_who_differs_from_all_others_is_named_by_the_hub(value):
    record = record_of(NAMES)
    reduction = StepReduction(1, NAMES, record)
    reduction.contribute("a", 1, 1, "equal", numbers(7.0))
    reduction.contribute("b", 1, 1, "equal", numbers(value))
    with pytest.raises(ReductionError, match="b has another basis or other fixed tables than a"):
        reduction.contribute("c", 1, 1, "equal", numbers(7.0))
    assert reduction.result(1) is None
    assert record.offence is not None
    assert record.offence[0] == "b"
    assert record.unlike is None


def test_of_two_that_differ_either_may_be_wrong():
    record = record_of(("a", "b"))
    reduction = StepReduction(1, ("a", "b"), record)
    reduction.contribute("a", 1, 1, "equal", numbers(7.0))
    with pytest.raises(ReductionError, match="another basis"):
        reduction.contribute("b", 1, 1, "equal", numbers(8.0))
    assert record.offence is None
    assert set(record.unlike or ()) == {"a", "b"}


@pytest.mark.parametrize(
    ("contribution", "message"),
    [
        (("d", 1, 1, "sum", numbers(1)), "d is not of generation 1"),
        (("b", 2, 1, "sum", numbers(1)), "b is not of generation 1"),
        (("b", 1, 2, "sum", numbers(1)), "b contributes round 2 where 1 is open"),
        (("b", 1, 0, "sum", numbers(1)), "b contributes round 0 where 1 is open"),
        (("b", 1, 1, "equal", numbers(1)), "round 1: b contributes 1 numbers for a equal, and a 1 for a sum"),
        (("b", 1, 1, "sum", numbers(1, 2)), "b contributes 2 numbers"),
    ],
)
def test_anything_else_is_refused(contribution, message):
    reduction = StepReduction(1, NAMES)
    reduction.contribute("a", 1, 1, "sum", numbers(1))
    with pytest.raises(ReductionError, match=message):
        reduction.contribute(*contribution)
    for name in ("b", "c"):
        assert reduction.result(1) is None
        reduction.contribute(name, 1, 1, "sum", numbers(1))
    assert reduction.result(1).tolist() == [3], "nothing of it was counted"


def test_nobody_changes_a_contribution():
    reduction = StepReduction(1, ("a", "b"))
    reduction.contribute("a", 1, 1, "sum", numbers(1))
    reduction.contribute("a", 1, 1, "sum", numbers(100))
    reduction.contribute("b", 1, 1, "sum", numbers(10))
    assert reduction.result(1).tolist() == [11]


def test_too_much_and_too_long_ago():
    reduction = StepReduction(1, ("a",))
    with pytest.raises(ReductionError, match="more than"):
        reduction.contribute("a", 1, 1, "sum", np.zeros(MAX_VALUES + 1))
    for number in range(1, 5):
        reduction.contribute("a", 1, number, "sum", numbers(number))
    assert [reduction.result(number) is None for number in range(1, 5)] == [True, True, False, False]
    with pytest.raises(ReductionError, match="round 1 where 5 is open"):
        reduction.contribute("a", 1, 1, "sum", numbers(1))
