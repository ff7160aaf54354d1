"""Which promise a run kept: exact, within a measured band, unknown."""

import math
import re

import pytest

from thinpipe.core.events import EventLog, Started, Step
from thinpipe.core.exactness import Exactness, exactness_of
from thinpipe.core.hub_events import ExactnessLost, GenerationStarted, PeerAssignment


def generation(step, *classes, number=1):
    peers = [
        PeerAssignment(name=f"p{index}", segments=[index], device="a card", device_class=each)
        for index, each in enumerate(classes)
    ]
    return GenerationStarted(generation=number, step=step, peers=peers)


def step(number, loss=2.0, grad_norm=1.0):
    return Step(step=number, loss=loss, grad_norm=grad_norm, lr=1e-3, tokens=number, seconds=1.0, tokens_per_second=1.0)


def started(step=0, changed=(), classes=(), segments=((0,),)):
    return Started(
        step=step,
        config="",
        parameters=1,
        versions={},
        changed=list(changed),
        device_classes=list(classes),
        segments=[list(each) for each in segments],
    )


def after(*events):
    found = Exactness()
    ends = [end for event in events if (end := found.on_event(event)) is not None]
    assert ends == ([] if found.lost is None else [found.lost]), "the end is told once"
    return found


def test_a_run_is_exact_while_each_segment_stays_with_one_class_of_device():
    again = [generation(2, "x", "y", number=2), step(3), step(4), step(5)]
    found = after(generation(0, "x", "y"), *map(step, range(1, 5)), *again)
    assert found.lost is None
    assert found.repeated == 2
    assert found.in_words() == (
        "exact: each segment was computed by devices of one class only; "
        "2 step(s) computed again had the same loss and gradient norm"
    )


@pytest.mark.parametrize(
    ("classes", "why"),
    [
        (("y", "x"), r"segment 0 moved to p0 \(a card\), y, from x"),
        (("x", ""), r"p1 \(a card\) does not repeat its own bits: set debug.deterministic"),
    ],
)
def test_another_class_ends_the_promise_and_what_is_computed_again_is_the_band(classes, why):
    events = [generation(0, "x", "y"), step(1), step(2), step(3), generation(1, *classes, number=2)]
    found = after(*events)
    assert found.lost.step == 1
    assert re.fullmatch(f"unknown since step 1 \\(before: exact\\): {why}", found.in_words())
    found = after(*events, step(2), step(3, loss=2.0 + 2e-6))
    assert found.lost.step == 1
    assert found.in_words().startswith(
        "within 1.0e-06 (loss and gradient norm of 2 step(s) computed again) since step 1 (before: exact): "
    )


def test_equal_classes_with_other_numbers_end_the_promise():
    found = after(generation(0, "x"), step(1), step(2), generation(1, "x", number=2), step(2, grad_norm=1.0 + 1e-15))
    assert found.lost.step == 2
    assert "another loss or norm" in found.lost.reason
    assert found.in_words().startswith("within 1.1e-15 ")


@pytest.mark.parametrize(("norm", "is_exact"), [(math.inf, False), (math.nan, False), (1.0, True)])
def test_a_number_that_is_not_finite_is_equal_to_itself_alone(norm, is_exact):
    found = after(generation(0, "x"), step(1), step(2, grad_norm=math.inf), step(1, grad_norm=norm))
    assert (found.lost is None) == is_exact
    again = after(generation(0, "x"), step(1, grad_norm=norm), step(1, grad_norm=norm))
    assert again.lost is None
    assert again.repeated == 1


def test_other_settings_give_other_numbers_and_end_no_promise():
    events = [started(classes=["x"]), step(1), step(2)]
    assert after(*events, started(step=1, changed=["optimizer.lr"], classes=["x"]), step(2, loss=1.0)).lost is None
    assert after(*events, started(step=1, classes=["x"]), step(2, loss=1.0)).lost is not None


def test_a_run_without_a_hub_tells_its_classes_when_it_starts():
    events = [started(classes=["x", "y"], segments=[[0], [1]])]
    assert after(*events).in_words().startswith("exact: ")
    assert after(*events, started(step=4, classes=["x"], segments=[[0, 1]])).lost.step == 4
    assert after(started()).in_words() == "", "a log of an earlier version"


def test_a_peers_word_does_not_outweigh_the_hubs():
    found = after(generation(0, "x"), started(classes=["y"]))
    assert found.lost is None
    assert found.classes == {0: "x"}


def test_the_state_comes_back_from_the_log(tmp_path):
    log = tmp_path / "events.jsonl"
    assert exactness_of(log).in_words() == ""
    lost = ExactnessLost(step=7, reason="a reason")
    with EventLog(log) as events:
        for event in (generation(0, "x", "y"), step(1), lost):
            events.write(event)
        events.write_line(b'{"event": "of another version"}')
    found = exactness_of(log)
    assert (found.lost, found.classes) == (lost, {0: "x", 1: "y"})
    assert found.unlike("x") == {1}
    assert found.on_event(generation(3, "y", "x", number=2)) is None, "it is lost already"
