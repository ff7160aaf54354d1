"""Who shall do what next: the roster is pure, so time is a number and peers are names."""

import pytest

from thinpipe.core.errors import UserError
from thinpipe.core.numerics import numerics
from thinpipe.swarm.assign import Assignment
from thinpipe.swarm.messages import Measure, NextRequest
from thinpipe.swarm.reports import MachineReport, ProcessorReport
from thinpipe.swarm.roster import MOST_SECONDS_TO_SAVE, Epoch, Roster

PROCESSOR = ProcessorReport(device="cpu", threads=1, flops=1e9, memory_nbytes=1 << 30)
REPORT = MachineReport(processor=PROCESSOR, up_bps=5.0, down_bps=5.0, latency_s=0.1, versions={})


def assign_all(machines, up, down):
    return Assignment(
        places=tuple((machine.name, range(i, i + 1)) for i, machine in enumerate(machines)),
        spares=(),
        too_small=(),
        loads=(),
        tokens_per_second=1.0,
        bottleneck=f"{up} {down}",
    )


def roster_of(wanted, assigner=assign_all, **settings):
    return Roster(wanted=wanted, assigner=assigner, **{"hub_bps": (1e6, 1e6)} | settings)


def ask(roster, name, now=0.0, *, life="a", report=REPORT, **fields):
    over = roster.asked(name, NextRequest(life=life, numerics=numerics(), report=report, **fields), now)
    return over, roster.next_for(name, now)


def test_the_first_epoch_waits_for_as_many_as_are_wanted():
    roster = roster_of(2)
    assert ask(roster, "a", now=1e6) == (None, None)
    over, epoch = ask(roster, "b", now=1e6)
    assert over is None
    assert epoch.names == ["a", "b"]
    assert roster.next_for("a", 1e6) is epoch
    assert ask(roster, "c", now=1e6) == (None, None), "who comes later is a spare"
    assert "spare" in roster.why_waiting("c")


def test_a_spare_takes_over_at_once_also_if_it_was_one_of_those_wanted():
    def assign_two(machines, up, down):
        return assign_all(machines[:2], up, down)

    roster = roster_of(3, assign_two)
    for name in ("a", "b", "c"):
        ask(roster, name)
    assert roster.current.names == ["a", "b"]
    roster.next_for("b", 0.0)
    assert roster.gone("b", "lost")
    assert ask(roster, "c", now=1.0, took_part_in=0)[1] is None, "a has not come out of the epoch yet"
    assert ask(roster, "a", now=1.0, took_part_in=1)[1].names == ["a", "c"], "nobody waits for b"


def test_machines_are_measured_one_after_the_other():
    roster = roster_of(2)
    assert ask(roster, "a", report=None)[1] == Measure(together=False)
    assert ask(roster, "b", report=None)[1] is None
    assert ask(roster, "a")[1] is None, "b is not measured yet"
    assert roster.next_for("b", 0.0) == Measure(together=False)
    assert isinstance(ask(roster, "b")[1], Epoch)


def test_one_that_is_lost_while_it_measures_makes_room():
    roster = roster_of(2)
    ask(roster, "a", report=None)
    ask(roster, "b", report=None)
    assert roster.gone("a", "lost") is None
    assert roster.next_for("b", 0.0) == Measure(together=False)


def test_what_all_measure_at_once_is_the_hubs_line():
    roster = roster_of(2, hub_bps=None)
    assert ask(roster, "a")[1] is None
    assert ask(roster, "b")[1] == Measure(together=True)
    assert roster.next_for("a", 0.0) == Measure(together=True)
    assert ask(roster, "a", together_bps=(1.0, 2.0))[1] is None
    epoch = ask(roster, "b", together_bps=(10.0, 20.0))[1]
    assert epoch.assignment.bottleneck == "22.0 11.0", "the hub sends what they receive"


def test_an_epoch_is_over_when_one_of_its_peers_is_gone_asks_again_or_was_started_again():
    for end in (
        lambda roster: roster.gone("b", "b is lost"),
        lambda roster: ask(roster, "b", took_part_in=1, why="a fault")[0],
        lambda roster: ask(roster, "b", life="another")[0],
    ):
        roster = roster_of(2)
        ask(roster, "a")
        ask(roster, "b")
        assert roster.current.number == 1
        assert end(roster)
        assert roster.current is None or roster.current.number == 2


def test_the_next_epoch_begins_when_all_have_come_out_of_the_last():
    roster = roster_of(2)
    ask(roster, "a")
    ask(roster, "b")
    over, found = ask(roster, "b", took_part_in=1)
    assert over
    assert found is None, "a may be sending what it has saved"
    over, epoch = ask(roster, "a", took_part_in=1)
    assert over is None
    assert (epoch.number, epoch.names) == (2, ["a", "b"])
    assert epoch.lives == {"a": 1, "b": 1}


def test_one_that_never_heard_of_an_epoch_that_is_over_is_not_waited_for():
    roster = roster_of(2)
    ask(roster, "a")
    ask(roster, "b")
    assert ask(roster, "a", took_part_in=1)[1] is None
    assert ask(roster, "b", took_part_in=0)[1].number == 2, "the answer was lost on the way to it"


def test_one_that_never_comes_out_is_not_waited_for_without_end():
    roster = roster_of(2)
    ask(roster, "a")
    ask(roster, "b")
    assert ask(roster, "b", now=10.0, took_part_in=1)[1] is None
    assert isinstance(roster.next_for("b", 10.0 + MOST_SECONDS_TO_SAVE), Epoch)


def test_an_epoch_of_which_nobody_was_told_can_be_called_off():
    roster = roster_of(2)
    ask(roster, "a")
    ask(roster, "b")
    ask(roster, "a", took_part_in=1)
    epoch = ask(roster, "b", took_part_in=1)[1]
    assert epoch.number == 2
    roster.call_off()
    assert not roster.at_work
    assert roster.next_for("a", 0.0).number == 3, "epochs only grow"


def test_who_waits_knows_for_whom():
    roster = roster_of(2)
    ask(roster, "a")
    assert roster.why_waiting("a") == "1 of 2 peers are there"
    ask(roster, "b")
    roster.gone("b", "b is lost")
    ask(roster, "a", took_part_in=1)
    assert roster.why_waiting("a") == "1 of 2 peers are there; waiting for b"


def test_another_life_has_another_number():
    roster = roster_of(2)
    ask(roster, "a")
    ask(roster, "b")
    ask(roster, "b", life="z")
    epoch = ask(roster, "a", took_part_in=1)[1]
    assert epoch.lives == {"a": 1, "b": 2}


def test_later_epochs_wait_for_the_lost_for_a_while_and_then_go_on_without():
    roster = roster_of(2, patience_seconds=60)
    ask(roster, "a")
    ask(roster, "b")
    roster.gone("b", "lost")
    assert ask(roster, "a", now=100.0, took_part_in=1)[1] is None
    assert "1 of 2" in roster.why_waiting("a")
    assert roster.next_for("a", 159.0) is None
    assert roster.next_for("a", 160.0).names == ["a"]


def test_what_is_missing_is_said():
    def too_small(_machines, _up, _down):
        raise UserError("12 GB are missing")

    roster = roster_of(1, too_small)
    assert ask(roster, "a") == (None, None)
    assert roster.why_waiting("a") == "12 GB are missing"


def test_epochs_only_grow_over_restarts_of_the_hub():
    roster = roster_of(1, last_epoch=7)
    assert ask(roster, "a")[1].number == 8


@pytest.mark.parametrize("name", ["a", "stranger"])
def test_those_who_are_not_there_have_nothing_to_do(name):
    assert roster_of(1).next_for(name, 0.0) is None


def test_what_did_not_fit_is_not_tried_again_with_the_same_machines():
    tried = []

    def assigner(machines, up, down):
        tried.append(len(machines))
        if len(machines) < 2:
            raise UserError("too small")
        return assign_all(machines, up, down)

    roster = roster_of(1, assigner)
    for now in range(5):
        assert ask(roster, "a", now=float(now)) == (None, None)
    assert (tried, roster.why_waiting("a")) == ([1], "too small")
    assert isinstance(ask(roster, "b", now=5.0)[1], Epoch)
    assert tried == [1, 2]


def test_nobody_has_taken_part_in_what_is_still_to_come():
    roster = roster_of(2)
    ask(roster, "a", took_part_in=1 << 62)
    assert ask(roster, "b")[1].names == ["a", "b"]
    assert roster.next_for("a", 0.0) is roster.current, "or the others would wait for it in vain"


def test_newcomers_are_measured_one_at_a_time_while_an_epoch_runs():
    roster = roster_of(2)
    ask(roster, "a")
    ask(roster, "b")
    assert ask(roster, "c", report=None) == (None, Measure(together=False))
    assert ask(roster, "d", report=None) == (None, None)
    assert ask(roster, "c") == (None, None), "it is a spare"
    assert roster.next_for("d", 0.0) == Measure(together=False)
    assert roster.current.names == ["a", "b"]


def test_one_that_is_not_measured_yet_holds_up_no_later_epoch():
    roster = roster_of(2)
    for name in ("a", "b", "c"):
        ask(roster, name)
    ask(roster, "d", report=None)
    roster.gone("b", "lost")
    assert ask(roster, "a", took_part_in=1)[1].names == ["a", "c"]


def test_the_hubs_line_is_measured_once():
    roster = roster_of(2, hub_bps=None)
    ask(roster, "a")
    ask(roster, "b")
    ask(roster, "a", together_bps=(1.0, 2.0))
    ask(roster, "b", together_bps=(10.0, 20.0))
    ask(roster, "c")
    ask(roster, "c", together_bps=(1e9, 1e9))
    roster.gone("b", "lost")
    epoch = ask(roster, "a", took_part_in=1)[1]
    assert (epoch.names, epoch.assignment.bottleneck) == (["a", "c"], "22.0 11.0")


def test_one_that_comes_while_all_measure_waits_until_they_have():
    roster = roster_of(2, hub_bps=None)
    ask(roster, "a")
    assert ask(roster, "b")[1] == Measure(together=True)
    assert ask(roster, "c", report=None)[1] is None
    assert ask(roster, "a")[1] == Measure(together=True)
    ask(roster, "a", together_bps=(1.0, 2.0))
    ask(roster, "b", together_bps=(10.0, 20.0))
    assert roster.next_for("c", 0.0) == Measure(together=False)
    assert ask(roster, "c")[1].names == ["a", "b", "c"]


def test_what_one_alone_has_measured_is_not_the_hubs_line():
    roster = roster_of(2, hub_bps=None)
    ask(roster, "a")
    ask(roster, "b")
    ask(roster, "a", together_bps=(1.0, 2.0))
    roster.gone("b", "lost")
    assert roster.hub_bps is None
    assert ask(roster, "b", life="z")[1] == Measure(together=True)
    assert roster.next_for("a", 0.0) == Measure(together=True)


def short_of_one(assigner=assign_all):
    """a computes alone, b was lost."""
    roster = roster_of(2, assigner, patience_seconds=10)
    ask(roster, "a")
    ask(roster, "b")
    roster.gone("b", "lost")
    ask(roster, "a", took_part_in=1)
    assert roster.next_for("a", 10.0).names == ["a"]
    return roster


def test_those_who_come_later_take_part_after_the_next_commit():
    roster = short_of_one()
    assert roster.committed(4) is None, "nobody is there"
    ask(roster, "c", report=None)
    assert roster.committed(8) is None, "c is not measured"
    ask(roster, "c")
    assert "after the next commit" in roster.why_waiting("c")
    assert roster.committed(12) == "c takes part from step 12 on"
    assert roster.current is None
    epoch = ask(roster, "a", took_part_in=2)[1]
    assert epoch.names == ["a", "c"]
    ask(roster, "d")
    assert roster.committed(16) is None, "there are as many as wanted"


def test_no_epoch_ends_for_one_that_would_have_nothing_to_do():
    def the_first(machines, up, down):
        return assign_all(machines[:1], up, down)

    roster = roster_of(2, the_first)
    ask(roster, "a")
    ask(roster, "b")
    assert roster.current.names == ["a"]
    assert roster.committed(4) is None


def test_a_program_that_another_has_followed_is_not_heard():
    roster = roster_of(2)
    ask(roster, "a")
    ask(roster, "b")
    ask(roster, "b", life="z")
    epoch = ask(roster, "a", took_part_in=1)[1]
    assert roster.is_past("b", "a")
    assert not roster.is_past("b", "z")
    assert roster.asked("b", NextRequest(life="a", numerics=numerics(), took_part_in=2), 0.0) is None
    assert roster.current is epoch
    assert epoch.lives == {"a": 1, "b": 2}


def test_one_that_was_lost_may_come_back_unless_another_was_started():
    roster = roster_of(2)
    ask(roster, "a")
    roster.gone("a", "lost")
    ask(roster, "a")
    assert roster.is_now("a", "a")
    roster.gone("a", "lost")
    assert not roster.is_now("a", "a")
    assert not roster.is_past("a", "a")
    ask(roster, "a", life="z")
    assert roster.is_past("a", "a")
    assert ask(roster, "a", life="a") == (None, None)
    assert roster.is_now("a", "z")
    assert not roster.is_now("b", "a")


def test_a_request_from_before_it_was_measured_does_not_make_one_unmeasured():
    roster = roster_of(3)
    ask(roster, "a", report=None)
    ask(roster, "a")
    ask(roster, "a", report=None)
    assert roster.report_of("a") == REPORT
