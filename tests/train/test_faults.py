"""Who is named when a step goes wrong: the first in the order of computation."""

import math

from thinpipe.training.faults import ABSURD, NOT_FINITE, find_fault

ENDS = [(boundary, forward) for boundary in range(3) for forward in (True, False)]
PROCESS_OF_SEGMENT = [0, 0, 1, 2]
SEGMENTS = {"a": 0, "b": 1, "c": 2, "d": 3}


def found(not_finite=(), outliers=(), loss=1.0, bad=()):
    return find_fault(
        {end: float(end in not_finite) for end in ENDS},
        {end: float(end in outliers) for end in ENDS},
        loss,
        {name: math.nan if name in bad else 1.0 for name in SEGMENTS},
        process_of_segment=PROCESS_OF_SEGMENT,
        segments=SEGMENTS,
    )


def test_a_good_step_has_no_fault():
    assert found() is None


def test_a_bad_state_spoils_all_after_it_and_its_sender_is_named():
    every = [*((b, True) for b in (1, 2)), *((b, False) for b in range(3))]
    fault = found(every, loss=math.nan, bad="abcd")
    assert (fault.culprit, fault.sender, fault.boundary, fault.forward) == ("state over boundary 1", 0, 1, True)
    assert fault.reason == NOT_FINITE


def test_a_bad_gradient_spoils_all_below_it():
    fault = found([(0, False), (1, False)], bad="ab")
    assert (fault.culprit, fault.sender, fault.boundary, fault.forward) == ("gradient over boundary 1", 1, 1, False)


def test_who_found_it_in_a_message_is_known_too():
    assert [found([end]).receiver for end in ((1, True), (2, True), (1, False))] == [1, 2, 0]
    assert found([(0, True)]).receiver == found([(0, True)]).sender == 0, "a boundary inside a process"
    assert found(loss=math.nan).receiver is None


def test_a_bad_loss_comes_before_the_gradients_made_of_it():
    fault = found([(b, False) for b in range(3)], loss=math.inf, bad="abcd")
    assert (fault.culprit, fault.sender, fault.boundary) == ("loss", 2, None)


def test_a_gradient_that_never_left_its_process():
    fault = found(bad="cd")
    assert (fault.culprit, fault.sender, fault.boundary) == ("c", 1, None)


def test_an_absurd_message_is_as_bad_and_says_so():
    fault = found([(1, True), (2, True)], [(0, True)])
    assert (fault.boundary, fault.sender, fault.reason) == (0, 0, ABSURD)
