"""Who was told to do something outside of an epoch and does not ask again."""

import pytest

from thinpipe.swarm.errands import Errands
from thinpipe.swarm.messages import Done, Give, Measure, Refused, Wait

GIVE = Give(step=1, files={}, manifest="", text="")


@pytest.mark.parametrize(
    ("answer", "words"),
    [(Measure(together=True), "to measure"), (GIVE, "to give what the hub has lost"), (Wait(text=""), "to wait")],
)
def test_who_does_not_ask_again_is_late(answer, words):
    errands = Errands(10.0)
    errands.told("a", answer, 0.0)
    assert not list(errands.late(10.0))
    said = f"a is lost: its heart beats, but it was told {words} 11 s ago and has not asked again (deadline 10 s)"
    assert list(errands.late(11.0)) == [("a", said)]
    errands.done("a")
    assert not list(errands.late(100.0))


def test_who_gives_piece_by_piece_may_take_as_long_as_it_likes():
    errands = Errands(10.0)
    errands.told("a", GIVE, 0.0)
    for now in range(0, 100, 9):
        errands.goes_on("a", float(now))
        errands.goes_on("b", float(now))
        assert not list(errands.late(float(now)))
    assert [name for name, _ in errands.late(200.0)] == ["a"]


@pytest.mark.parametrize("answer", [Done(text=""), Refused(text="")])
def test_who_has_nothing_to_do_is_not_watched(answer):
    errands = Errands(10.0)
    errands.told("a", Wait(text=""), 0.0)
    errands.told("a", answer, 1.0)
    assert not list(errands.late(100.0))


def test_a_hub_that_slept_blames_nobody():
    errands = Errands(10.0)
    errands.told("a", Wait(text=""), 0.0)
    errands.excuse(50.0)
    assert not list(errands.late(60.0))
    assert list(errands.late(61.0))
