"""Why a generation has ended: the record of its steps is believed, what one peer says is said with its name."""

import numpy as np
import pytest

from tests.swarm.judged import contribution, cuts, layout
from thinpipe.core.events import Retried, Skipped, Step, Stopped
from thinpipe.core.hub_events import PeerResumed, PeerSuspended
from thinpipe.core.numerics import numerics
from thinpipe.planning.partition import Partition
from thinpipe.swarm.hub.conduct import Conduct
from thinpipe.swarm.hub.replica import Generation, GenerationEnd
from thinpipe.swarm.hub.services.reduction import ReductionError, StepReduction
from thinpipe.swarm.hub.suspects import MAX_ENDS_WITHOUT_COMMIT, Suspects
from thinpipe.swarm.hub.suspensions import Suspensions
from thinpipe.swarm.protocol.messages import Accusation, NextRequest

NAMES = ("anna", "bert", "carl")
SHARES = (2, 2, 2)
BAD = (1, True)
"""What anna sends to bert."""


class Steps:
    """A generation of these peers that computes from step 10 on; the run has 15."""

    def __init__(self, names=NAMES, members=NAMES):
        self.conduct, self.names, self.round = Conduct(lambda: members, Suspects(Suspensions())), names, 0
        self.begin()

    def begin(self):
        shares = SHARES if len(self.names) == 3 else (6,)
        stages = tuple((name, range(0)) for name in self.names)
        partition = Partition(stages=stages, standbys=(), too_small=(), loads=(), tokens_per_second=1.0, bottleneck="")
        self.layout = layout(shares, steps=15)
        self.record = self.conduct.begin(Generation(1, partition, {}), self.layout, 10)
        self.reduction, self.round = StepReduction(1, self.names, self.record), 0

    def step(self, **of_one):
        """One attempt. `of_one`: by name, in what its contribution differs from an honest one."""
        self.round += 1
        for rank, name in enumerate(self.names):
            values = contribution(self.layout, rank, **of_one.get(name, {}))
            self.reduction.contribute(name, 1, self.round, "step", values)

    def steps(self, count, **of_one):
        for _ in range(count):
            self.step(**of_one)

    def end(self, name, leaving=(), **fields):
        request = NextRequest(incarnation="a", numerics=numerics(), left_generation=1, **fields)
        return self.conduct.end_by_request(name, request, leaving, 0.0)

    def told(self, name, event):
        return self.conduct.compared(name, event)


def step(number, loss=2.0, norm=6**0.5):
    return Step(step=number, loss=loss, grad_norm=norm, lr=1e-3, tokens=1, seconds=1.0, tokens_per_second=1.0)


def accusation(name, step=11):
    return Accusation(name=name, step=step, what="bad")


@pytest.mark.parametrize(
    ("fields", "cause", "peer", "says"),
    [
        ({"stop_reason": "finished"}, "failed", "anna", "no sum of the steps shows"),
        ({"stop_reason": "not_finite"}, "failed", "anna", "no sum of the steps shows"),
        ({"stop_reason": "not_saved"}, "failed", "anna", "no sum of the steps shows"),
        ({"stop_reason": "signal"}, "failed", "anna", "no sum of the steps shows"),
        ({"error": "its memory is full"}, "failed", "anna", "its memory is full"),
        ({"error": "bad", "accusation": accusation("bert")}, "failed", "anna", "anna says that bert"),
        ({"accusation": accusation("dora")}, "failed", "anna", "does not take part"),
        ({"accusation": accusation("anna")}, "failed", "anna", "does not take part"),
        ({}, "failed", "anna", "asked what to do next"),
    ],
)
def test_what_one_says_of_the_end_ends_a_generation_in_its_name(fields, cause, peer, says):
    steps = Steps()
    steps.steps(2)
    end = steps.end("anna", **fields)
    assert (end.cause, end.peer) == (cause, peer)
    assert says in end.reason
    assert steps.conduct.pop_rulings() == []
    assert steps.conduct.pop_events(0) == []


def test_a_lie_about_another_counts_against_the_liar_alone():
    steps = Steps()
    for _ in range(MAX_ENDS_WITHOUT_COMMIT):
        steps.begin()
        steps.end("anna", error="bad", accusation=accusation("bert"))
    assert [event.peer for event in steps.conduct.pop_events(0)] == ["anna"]


def test_who_ends_three_generations_without_a_commit_is_suspended_and_a_commit_is_a_new_beginning():
    for commits in (False, True):
        steps = Steps()
        for _ in range(MAX_ENDS_WITHOUT_COMMIT):
            steps.begin()
            steps.end("anna", error="no memory")
            if commits:
                steps.conduct.suspects.on_commit(15)
        suspended = steps.conduct.pop_events(0)
        assert [event.peer for event in suspended] == ([] if commits else ["anna"])
        assert all("no memory" in event.reason for event in suspended)


def test_the_last_step_ends_the_run_and_no_earlier_one():
    steps = Steps()
    steps.steps(5)
    assert steps.end("bert", stop_reason="finished") == GenerationEnd("finished", "the last step is computed")
    assert steps.end("bert", stop_reason="not_saved").cause == "not_saved"


def test_who_asks_all_to_stop_is_named_though_it_has_not_announced_to_leave_and_has_to_leave():
    steps = Steps()
    steps.step(carl={"stop": 1.0})
    assert steps.end("anna", stop_reason="signal") == GenerationEnd("left", "carl left", "carl")
    assert steps.end("anna", leaving=["bert"], stop_reason="signal") == GenerationEnd("left", "bert left", "bert")
    back = NextRequest(incarnation="a", numerics=numerics(), left_generation=1, stop_reason="signal")
    for _ in range(MAX_ENDS_WITHOUT_COMMIT):
        steps.record.stoppers.add("carl")
        for name in ("anna", "carl", "carl"):
            steps.conduct.on_return(name, back, 0.0)
    assert [event.peer for event in steps.conduct.pop_events(0)] == ["carl"]


def test_bad_values_are_the_word_of_the_receiver_against_the_sender_whoever_asks_first():
    steps = Steps()
    steps.step()
    steps.steps(2, bert={"bad": [BAD]})
    end = steps.end("carl", error="a lie", accusation=accusation("bert"))
    assert (end.cause, end.peer) == ("accused", "anna")
    (suspended,) = steps.conduct.pop_events(0)
    assert isinstance(suspended, PeerSuspended)
    assert (suspended.peer, suspended.by) == ("anna", "bert")
    assert "bert says that anna sent bad values twice in step 12 (state over boundary 1 is not finite)" in end.reason


@pytest.mark.parametrize("what", [{"loss": np.nan}, {"norms": np.inf}])
def test_who_alone_makes_steps_bad_is_suspended_and_the_run_goes_on(what):
    steps = Steps()
    steps.steps(6, carl=what)
    end = steps.end("anna", stop_reason="not_finite")
    assert (end.cause, end.peer) == ("accused", "carl")
    assert steps.conduct.pop_rulings() == []
    assert [event.peer for event in steps.conduct.pop_events(0)] == ["carl"]


def test_steps_that_are_bad_on_other_machines_too_stop_the_run():
    steps = Steps()
    steps.steps(6, carl={"loss": np.nan})
    steps.end("anna", stop_reason="not_finite")
    steps.begin()
    steps.steps(6, anna={"norms": np.nan})
    end = steps.end("anna", stop_reason="not_finite")
    assert end.cause == "not_finite"
    assert [ruling.stop for ruling in steps.conduct.pop_rulings()] == ["not_finite"]
    assert [(type(event), event.peer) for event in steps.conduct.pop_events(0)] == [
        (PeerSuspended, "carl"),
        (PeerResumed, "carl"),
    ]


def test_what_is_bad_once_counts_for_nothing():
    """Another peer is at fault once, before one is twice."""
    steps = Steps()
    steps.step(carl={"norms": np.nan})
    steps.steps(2, bert={"bad": [BAD]})
    assert steps.record.finding.suspects == {"anna", "bert"}


def test_the_only_peer_is_believed_if_the_run_has_no_other():
    alone = Steps(names=("anna",), members=("anna",))
    assert alone.end("anna", stop_reason="not_finite").cause == "not_finite"
    assert [ruling.stop for ruling in alone.conduct.pop_rulings()] == ["not_finite"]
    with_others = Steps(names=("anna",))
    assert with_others.end("anna", stop_reason="not_finite").cause == "accused"
    assert with_others.conduct.pop_rulings() == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values, _layout: values[:-1], "numbers to the vector of a step"),
        (lambda values, _layout: values + 1.0, "numbers of other peers"),
        (lambda values, _layout: values * np.nan, "numbers of other peers"),
        (lambda _values, layout: contribution(layout, 0, stop=-5.0), "asks to stop -5.0 times"),
        (lambda _values, layout: contribution(layout, 0, stop=np.nan), "asks to stop nan times"),
    ],
)
def test_what_no_honest_peer_contributes_is_refused_in_its_name(change, message):
    steps = Steps()
    with pytest.raises(ReductionError, match=message):
        steps.reduction.contribute("anna", 1, 1, "step", change(contribution(steps.layout, 0), steps.layout))
    end = steps.conduct.offence(0.0)
    assert (end.cause, end.peer) == ("accused", "anna")
    assert [event.peer for event in steps.conduct.pop_events(0)] == ["anna"]
    assert steps.conduct.offence(0.0) is None


def test_the_log_has_what_the_sums_show():
    steps = Steps()
    steps.step()
    event, wrong = steps.told("anna", step(11, loss=1.0))
    assert (event.loss, event.grad_norm) == (2.0, 6**0.5)
    assert wrong.startswith("anna reports loss 1 ")
    assert steps.told("anna", step(11)) == (None, "anna reports step 11 again")
    assert steps.told("anna", step(12)) == (None, "anna reports step 12, which was not computed")
    for kind in (Retried, Skipped):
        fields = {"boundary": 1, "forward": True, "reason": "bad"} if kind is Retried else {"loss": None}
        lie = kind(step=11, culprit="loss", sender="bert", **fields)
        assert steps.told("anna", lie)[0] is None
    for reason in ("finished", "signal", "not_saved", "not_finite"):
        event, wrong = steps.told("anna", Stopped(step=11, reason=reason))
        assert event is None
        assert wrong
    steps.step(bert={"bad": [BAD]})
    true = Retried(step=12, culprit="state", sender="anna", boundary=1, forward=True, reason="bad")
    assert steps.told("anna", true) == (true, "")
    steps.steps(4)
    honest = step(14)
    assert steps.told("anna", honest) == (honest, "")
    over = Stopped(step=15, reason="finished")
    assert steps.told("anna", over) == (over, "")


def test_every_number_but_the_stop_flag_has_one_owner():
    owners = layout(SHARES).owners()
    assert (owners == -1).sum() == 1
    for rank in range(3):
        received = [end for _, receiver, end in cuts(layout(SHARES)) if receiver == rank]
        values = contribution(layout(SHARES), rank, bad=received)
        assert set(owners[values != 0]) == {rank}


def test_of_two_that_sum_different_things_either_may_be_wrong():
    steps = Steps()
    steps.reduction.contribute("anna", 1, 1, "sum", np.zeros(3))
    with pytest.raises(ReductionError):
        steps.reduction.contribute("bert", 1, 1, "step", contribution(steps.layout, 1))
    for _ in range(MAX_ENDS_WITHOUT_COMMIT):
        steps.end("bert", error="round 1: bert contributes 60 numbers for a step, and anna 3 for a sum")
    assert [event.peer for event in steps.conduct.pop_events(0)] == ["anna"]


def test_a_sudden_change_at_a_boundary_is_the_hubs_own_finding():
    run = Steps()
    run.steps(60, bert={"received": {BAD: 1.0}})
    assert run.conduct.pop_alarms() == []
    run.steps(3, bert={"received": {BAD: 2.0}})
    (alarm,) = run.conduct.pop_alarms()
    assert (alarm.step, alarm.kind, alarm.peers) == (73, "size", ["anna"])
    assert run.conduct.pop_alarms() == []
    assert run.told("anna", alarm) == (None, ""), "what a peer says of it is not needed"


def test_alarms_outlive_their_generation():
    run = Steps()
    run.steps(60, bert={"received": {BAD: 1.0}})
    run.steps(3, bert={"received": {BAD: 2.0}})
    run.begin()
    assert len(run.conduct.pop_alarms()) == 1


def test_nobody_tells_the_figures_of_another():
    """carl neither sends nor receives at that boundary, and anna only sends."""
    for name in ("carl", "anna"):
        run = Steps()
        with pytest.raises(ReductionError, match=f"{name} contributes numbers of other peers"):
            run.step(**{name: {"received": {BAD: 1.0}}})
