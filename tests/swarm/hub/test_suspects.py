"""Whom the hub suspects: the word of one against that of another removes nobody; two may."""

from thinpipe.swarm.hub.step_record import Finding
from thinpipe.swarm.hub.suspects import MAX_TRIES, Suspects
from thinpipe.swarm.hub.suspensions import FIRST_SECONDS, LONGEST_SECONDS, Suspensions

NAMES = ("a", "b", "c", "d")


def said(accuser, accused, step=7, *, skipped=False):
    suspects = frozenset({accuser, accused} - {""})
    return Finding(
        step=step, suspects=suspects, accused=accused, accuser=accuser, what="state is not finite", skipped=skipped
    )


def judge(suspects, finding, names=NAMES, members=4):
    return suspects.on_finding(finding, names, 0.0, members=members)


def test_of_a_first_pair_the_sender_is_suspended_and_then_each_in_turn():
    suspects = Suspects(Suspensions())
    chosen = []
    for step in (10, 30, 50, 70):
        chosen.append(judge(suspects, said("a", "b", step), names=("a", "b"), members=2).suspended)
        suspects.suspensions.lift(chosen[-1], "")
    assert chosen == ["b", "a", "b", "a"], "of two nobody is removed"


def test_who_accuses_another_again_is_suspended_itself_and_the_first_is_free():
    suspects = Suspects(Suspensions())
    assert judge(suspects, said("a", "b")).suspended == "b"
    ruling = judge(suspects, said("a", "c"), names=("a", "c", "d"))
    assert (ruling.suspended, ruling.expelled) == ("a", "")
    assert list(suspects.suspensions.until) == ["a"]
    assert suspects.suspensions.pop_ended() == [("b", "a is suspected instead")]


def test_two_that_find_the_same_peer_bad_in_different_steps_remove_it_if_they_are_most():
    for names, removed in ((("a", "b", "d"), True), (NAMES, True), ((*NAMES, "e"), False), ((*NAMES, "e", "f"), False)):
        suspects = Suspects(Suspensions())
        assert judge(suspects, said("a", "d", 10), names).suspended == "d"
        suspects.suspensions.lift("d", "")
        ruling = judge(suspects, said("b", "d", 40), names)
        assert (ruling.expelled, ruling.suspended) == (("d", "") if removed else ("", "d")), names


def test_the_same_steps_count_once():
    """A run that has diverged is bad there on every machine."""
    suspects = Suspects(Suspensions())
    judge(suspects, said("a", "d", 10))
    suspects.suspensions.lift("d", "")
    assert judge(suspects, said("b", "d", 11)).suspended == "d"


def test_the_word_of_who_accuses_several_removes_nobody():
    suspects = Suspects(Suspensions())
    judge(suspects, said("a", "d", 10))
    assert judge(suspects, said("a", "c", 25)).suspended == "a"
    ruling = judge(suspects, said("b", "d", 40))
    assert (ruling.expelled, ruling.suspended) == ("", "d")


def test_what_no_single_peer_explains_is_the_run_itself():
    suspects = Suspects(Suspensions())
    assert judge(suspects, said("a", "b")).suspended == "b"
    ruling = judge(suspects, said("c", "d", 8), names=("a", "c", "d"))
    assert (ruling.suspended, ruling.expelled, ruling.stop) == ("", "", "")
    assert suspects.diverged_steps == [7, 8]
    assert not suspects.suspensions.until, "nobody is suspected any more"
    assert judge(suspects, said("a", "b", skipped=True)).stop == "not_finite"


def test_other_steps_are_another_case():
    suspects = Suspects(Suspensions())
    judge(suspects, said("a", "b"))
    judge(suspects, said("c", "d", 70))
    assert suspects.diverged_steps == []


def test_a_run_that_cannot_do_without_its_suspects_stops_with_their_names():
    suspects = Suspects(Suspensions())
    for _ in range(MAX_TRIES):
        assert judge(suspects, said("a", "b"), names=("a", "b"), members=2).stop == ""
        suspects.suspensions.lift("a", ""), suspects.suspensions.lift("b", "")
    stop = judge(suspects, said("a", "b"), names=("a", "b"), members=2).stop
    assert "a or b" in stop
    assert "thinpipe kick" in stop


def test_what_was_overcome_is_forgotten_with_a_later_commit():
    suspects = Suspects(Suspensions())
    judge(suspects, said("a", "b", 7))
    judge(suspects, said("c", "d", 8))
    suspects.on_commit(9)
    assert suspects.diverged_steps == [7, 8]
    suspects.on_commit(20)
    assert suspects.diverged_steps == []


def test_suspensions_grow_and_end():
    suspensions = Suspensions()
    assert suspensions.suspend("a", "why", 0.0) == FIRST_SECONDS
    suspensions.expire(FIRST_SECONDS - 1)
    assert "a" in suspensions
    assert suspensions.in_words(FIRST_SECONDS - 60)["a"] == "for another 60 s: why"
    suspensions.extend(100.0)
    suspensions.expire(FIRST_SECONDS)
    assert "a" in suspensions, "the hub stood still meanwhile"
    suspensions.expire(FIRST_SECONDS + 100.0)
    assert "a" not in suspensions
    assert suspensions.pop_ended() == [("a", "its time is over")]
    assert suspensions.suspend("a", "why", 0.0) == 2 * FIRST_SECONDS
    for _ in range(20):
        longest = suspensions.suspend("a", "why", 0.0)
    assert longest == LONGEST_SECONDS
