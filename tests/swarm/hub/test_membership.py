"""Who shall do what next: membership is pure, so time is a number and peers are names."""

import msgspec
import pytest

from thinpipe.core.errors import UserError
from thinpipe.core.hub_events import GenerationStarted
from thinpipe.core.numerics import numerics
from thinpipe.planning.partition import Partition, SegmentNeeds, Traffic, make_partition
from thinpipe.swarm.hub.assignments import measuring_text
from thinpipe.swarm.hub.membership import Membership
from thinpipe.swarm.hub.replica import Generation, GenerationEnd
from thinpipe.swarm.protocol.machine_report import MachineReport, ProcessorReport
from thinpipe.swarm.protocol.messages import MAX_UPLOAD_SECONDS, Measure, NextRequest

PROCESSOR = ProcessorReport(device="cpu", threads=1, flops=1e9, memory_nbytes=1 << 30)
REPORT = MachineReport(processor=PROCESSOR, up_bps=5.0, down_bps=5.0, latency_s=0.1, versions={})


def partition_all(machines, up, down):
    return Partition(
        stages=tuple((machine.name, range(i, i + 1)) for i, machine in enumerate(machines)),
        standbys=(),
        too_small=(),
        loads=(),
        tokens_per_second=1.0,
        bottleneck=f"{up} {down}",
    )


def make_membership(wanted, partitioner=partition_all, **settings):
    return Membership(wanted=wanted, partitioner=partitioner, **{"hub_bps": (1e6, 1e6)} | settings)


def ask(membership, name, now=0.0, *, incarnation="a", report=REPORT, **fields):
    over = membership.on_next_request(
        name, NextRequest(incarnation=incarnation, numerics=numerics(), report=report, **fields), now
    )
    return over, membership.next_for(name, now)


def test_the_first_generation_waits_for_as_many_as_are_wanted():
    membership = make_membership(2)
    assert ask(membership, "a", now=1e6) == (None, None)
    over, generation = ask(membership, "b", now=1e6)
    assert over is None
    assert generation.names == ["a", "b"]
    assert membership.next_for("a", 1e6) is generation
    assert ask(membership, "c", now=1e6) == (None, None), "who comes later is a standby"
    assert "standby" in membership.wait_reason("c")


def test_a_standby_takes_over_at_once_also_if_it_was_one_of_those_wanted():
    def assign_two(machines, up, down):
        return partition_all(machines[:2], up, down)

    membership = make_membership(3, assign_two)
    for name in ("a", "b", "c"):
        ask(membership, name)
    assert membership.replicas[0].current.names == ["a", "b"]
    membership.next_for("b", 0.0)
    assert membership.drop_peer("b", "lost")
    assert ask(membership, "c", now=1.0, left_generation=0)[1] is None, "a has not come out of the generation yet"
    assert ask(membership, "a", now=1.0, left_generation=1)[1].names == ["a", "c"], "nobody waits for b"


def test_machines_are_measured_one_after_the_other():
    membership = make_membership(2)
    assert ask(membership, "a", report=None)[1] == Measure(concurrent=False)
    assert ask(membership, "b", report=None)[1] is None
    assert ask(membership, "a")[1] is None, "b is not measured yet"
    assert membership.next_for("b", 0.0) == Measure(concurrent=False)
    assert isinstance(ask(membership, "b")[1], Generation)


def test_one_that_is_lost_while_it_measures_makes_room():
    membership = make_membership(2)
    ask(membership, "a", report=None)
    ask(membership, "b", report=None)
    assert membership.drop_peer("a", "lost") is None
    assert membership.next_for("b", 0.0) == Measure(concurrent=False)


def test_what_all_measure_at_once_is_the_hubs_line():
    membership = make_membership(2, hub_bps=None)
    assert ask(membership, "a")[1] is None
    assert ask(membership, "b")[1] == Measure(concurrent=True)
    assert membership.next_for("a", 0.0) == Measure(concurrent=True)
    assert ask(membership, "a", concurrent_bps=(1.0, 2.0))[1] is None
    generation = ask(membership, "b", concurrent_bps=(10.0, 20.0))[1]
    assert generation.partition.bottleneck == "22.0 11.0", "the hub sends what they receive"


def test_a_generation_is_over_when_one_of_its_peers_is_gone_asks_again_or_was_started_again():
    for end in (
        lambda membership: membership.drop_peer("b", "b is lost"),
        lambda membership: ask(membership, "b", left_generation=1, error="a fault")[0],
        lambda membership: ask(membership, "b", incarnation="another")[0],
    ):
        membership = make_membership(2)
        ask(membership, "a")
        ask(membership, "b")
        assert membership.replicas[0].current.number == 1
        assert end(membership)
        assert membership.replicas[0].current is None or membership.replicas[0].current.number == 2


def test_whoever_asks_first_ends_the_generation_and_the_judge_says_why():
    asked = []

    def judge(*asked_of):
        asked.append(asked_of)
        return GenerationEnd("failed", "a failed", "a")

    membership = make_membership(2, judge=judge)
    ask(membership, "a")
    ask(membership, "b")
    membership.on_leave_announced("b")
    end, _ = ask(membership, "a", left_generation=1, error="its memory is full")
    assert end == GenerationEnd("failed", "a failed", "a", generation=1)
    ask(membership, "b", left_generation=1)
    ((generation, name, request, leaving),) = asked
    assert (generation.number, name, request.error, leaving) == (1, "a", "its memory is full", ["b"])


def test_a_suspended_peer_waits_and_is_not_waited_for():
    membership = make_membership(3)
    for name in ("a", "b", "c"):
        ask(membership, name)
    membership.candidates.suspensions.suspend("b", "it was bad", 0.0)
    membership.end(membership.replicas[0].current, GenerationEnd("deadlock", "they wait"))
    for name in ("a", "b"):
        ask(membership, name, left_generation=1)
    assert ask(membership, "c", left_generation=1)[1].names == ["a", "c"]
    assert "b is suspended for a while: it was bad" in membership.wait_reason("b")
    assert membership.on_commit() is None
    membership.candidates.suspensions.expire(300.0)
    assert membership.on_commit().reason == "b can take part now"


def test_suspensions_are_lifted_if_the_model_does_not_fit_without():
    def needs_two(machines, up, down):
        if len(machines) < 2:
            raise UserError("too small")
        return partition_all(machines, up, down)

    membership = make_membership(3, needs_two)
    for name in ("a", "b", "c"):
        ask(membership, name)
    for name in ("c", "b"):
        membership.candidates.suspensions.suspend(name, "it was bad", 0.0)
    membership.candidates.suspensions.until["b"] += 1.0
    membership.end(membership.replicas[0].current, GenerationEnd("deadlock", "they wait"))
    for name in ("a", "b", "c"):
        ask(membership, name, left_generation=1)
    assert sorted(membership.replicas[0].current.names) == ["a", "c"], "first whose time is over first"
    assert membership.candidates.suspensions.pop_ended() == [("c", "the run cannot do without it")]
    assert "b" in membership.candidates.suspensions


def test_the_next_generation_begins_when_all_have_come_out_of_the_last():
    membership = make_membership(2)
    ask(membership, "a")
    ask(membership, "b")
    over, found = ask(membership, "b", left_generation=1)
    assert over
    assert found is None, "a may be sending what it has saved"
    over, generation = ask(membership, "a", left_generation=1)
    assert over is None
    assert (generation.number, generation.names) == (2, ["a", "b"])
    assert generation.incarnations == {"a": 1, "b": 1}


def test_one_that_never_heard_of_a_generation_that_is_over_is_not_waited_for():
    membership = make_membership(2)
    ask(membership, "a")
    ask(membership, "b")
    assert ask(membership, "a", left_generation=1)[1] is None
    assert ask(membership, "b", left_generation=0)[1].number == 2, "the answer was lost on the way to it"


def test_one_that_never_comes_out_is_not_waited_for_without_end():
    membership = make_membership(2)
    ask(membership, "a")
    ask(membership, "b")
    assert ask(membership, "b", now=10.0, left_generation=1)[1] is None
    assert isinstance(membership.next_for("b", 10.0 + MAX_UPLOAD_SECONDS), Generation)


def test_a_generation_of_which_nobody_was_told_can_be_called_off():
    membership = make_membership(2)
    ask(membership, "a")
    ask(membership, "b")
    ask(membership, "a", left_generation=1)
    generation = ask(membership, "b", left_generation=1)[1]
    assert generation.number == 2
    membership.cancel_start()
    assert not membership.busy
    assert membership.next_for("a", 0.0).number == 3, "generations only grow"


def test_who_waits_knows_for_whom():
    membership = make_membership(2)
    ask(membership, "a")
    assert membership.wait_reason("a") == "1 of 2 peers are connected"
    ask(membership, "b")
    membership.drop_peer("b", "b is lost")
    ask(membership, "a", left_generation=1)
    assert membership.wait_reason("a") == (
        "1 of 2 peers are connected; waiting for b, for up to 60 s, then going on without"
    )


def test_another_incarnation_has_another_number():
    membership = make_membership(2)
    ask(membership, "a")
    ask(membership, "b")
    ask(membership, "b", incarnation="z")
    generation = ask(membership, "a", left_generation=1)[1]
    assert generation.incarnations == {"a": 1, "b": 2}


def test_later_generations_wait_for_the_lost_for_a_while_and_then_go_on_without():
    membership = make_membership(2, patience_seconds=60)
    ask(membership, "a")
    ask(membership, "b")
    membership.drop_peer("b", "lost")
    assert ask(membership, "a", now=100.0, left_generation=1)[1] is None
    assert "1 of 2" in membership.wait_reason("a")
    assert membership.next_for("a", 159.0) is None
    assert membership.next_for("a", 160.0).names == ["a"]


def test_what_is_missing_is_said():
    def too_small(_machines, _up, _down):
        raise UserError("12 GB are missing")

    membership = make_membership(1, too_small)
    assert ask(membership, "a") == (None, None)
    assert membership.wait_reason("a") == "12 GB are missing"


def test_generations_only_grow_over_restarts_of_the_hub():
    membership = make_membership(1, last_generation=7)
    assert ask(membership, "a")[1].number == 8


@pytest.mark.parametrize("name", ["a", "stranger"])
def test_those_who_are_not_there_have_nothing_to_do(name):
    assert make_membership(1).next_for(name, 0.0) is None


def test_what_did_not_fit_is_not_tried_again_with_the_same_machines():
    tried = []

    def partitioner(machines, up, down):
        tried.append(len(machines))
        if len(machines) < 2:
            raise UserError("too small")
        return partition_all(machines, up, down)

    membership = make_membership(1, partitioner)
    for now in range(5):
        assert ask(membership, "a", now=float(now)) == (None, None)
    assert (tried, membership.wait_reason("a")) == ([1], "too small")
    assert isinstance(ask(membership, "b", now=5.0)[1], Generation)
    assert tried == [1, 2]


def test_nobody_has_taken_part_in_what_is_still_to_come():
    membership = make_membership(2)
    ask(membership, "a", left_generation=1 << 62)
    assert ask(membership, "b")[1].names == ["a", "b"]
    assert membership.next_for("a", 0.0) is membership.replicas[0].current, "or the others would wait for it in vain"


def test_newcomers_are_measured_one_at_a_time_while_a_generation_runs():
    membership = make_membership(2)
    ask(membership, "a")
    ask(membership, "b")
    assert ask(membership, "c", report=None) == (None, Measure(concurrent=False))
    assert ask(membership, "d", report=None) == (None, None)
    assert ask(membership, "c") == (None, None), "it is a standby"
    assert membership.next_for("d", 0.0) == Measure(concurrent=False)
    assert membership.replicas[0].current.names == ["a", "b"]


def test_one_that_is_not_measured_yet_holds_up_no_later_generation():
    membership = make_membership(2)
    for name in ("a", "b", "c"):
        ask(membership, name)
    ask(membership, "d", report=None)
    membership.drop_peer("b", "lost")
    assert ask(membership, "a", left_generation=1)[1].names == ["a", "c"]


def test_the_hubs_line_is_measured_once():
    membership = make_membership(2, hub_bps=None)
    ask(membership, "a")
    ask(membership, "b")
    ask(membership, "a", concurrent_bps=(1.0, 2.0))
    ask(membership, "b", concurrent_bps=(10.0, 20.0))
    ask(membership, "c")
    ask(membership, "c", concurrent_bps=(1e9, 1e9))
    membership.drop_peer("b", "lost")
    generation = ask(membership, "a", left_generation=1)[1]
    assert (generation.names, generation.partition.bottleneck) == (["a", "c"], "22.0 11.0")


def test_one_that_comes_while_all_measure_waits_until_they_have():
    membership = make_membership(2, hub_bps=None)
    ask(membership, "a")
    assert ask(membership, "b")[1] == Measure(concurrent=True)
    assert ask(membership, "c", report=None)[1] is None
    assert ask(membership, "a")[1] == Measure(concurrent=True)
    ask(membership, "a", concurrent_bps=(1.0, 2.0))
    ask(membership, "b", concurrent_bps=(10.0, 20.0))
    assert membership.next_for("c", 0.0) == Measure(concurrent=False)
    assert ask(membership, "c")[1].names == ["a", "b", "c"]


def test_what_one_alone_has_measured_is_not_the_hubs_line():
    membership = make_membership(2, hub_bps=None)
    ask(membership, "a")
    ask(membership, "b")
    ask(membership, "a", concurrent_bps=(1.0, 2.0))
    membership.drop_peer("b", "lost")
    assert membership.present.hub_bps is None
    assert ask(membership, "b", incarnation="z")[1] == Measure(concurrent=True)
    assert membership.next_for("a", 0.0) == Measure(concurrent=True)


def partitioner_short_of_one(partitioner=partition_all):
    """a computes alone, b was lost."""
    membership = make_membership(2, partitioner, patience_seconds=10)
    ask(membership, "a")
    ask(membership, "b")
    membership.drop_peer("b", "lost")
    ask(membership, "a", left_generation=1)
    assert membership.next_for("a", 10.0).names == ["a"]
    return membership


def test_those_who_come_later_take_part_after_the_next_commit():
    membership = partitioner_short_of_one()
    assert membership.on_commit() is None, "nobody is there"
    ask(membership, "c", report=None)
    assert membership.on_commit() is None, "c is not measured"
    ask(membership, "c")
    assert "after the next commit" in membership.wait_reason("c")
    assert membership.on_commit().reason == "c can take part now"
    assert membership.replicas[0].current is None
    generation = ask(membership, "a", left_generation=2)[1]
    assert generation.names == ["a", "c"]
    ask(membership, "d")
    assert membership.on_commit() is None, "there are as many as wanted"


def test_no_generation_ends_for_one_that_would_have_nothing_to_do():
    def the_first(machines, up, down):
        return partition_all(machines[:1], up, down)

    membership = make_membership(2, the_first)
    ask(membership, "a")
    ask(membership, "b")
    assert membership.replicas[0].current.names == ["a"]
    assert membership.on_commit() is None


def test_a_program_that_another_has_followed_is_not_heard():
    membership = make_membership(2)
    ask(membership, "a")
    ask(membership, "b")
    ask(membership, "b", incarnation="z")
    generation = ask(membership, "a", left_generation=1)[1]
    assert membership.present.is_superseded("b", "a")
    assert not membership.present.is_superseded("b", "z")
    assert (
        membership.on_next_request("b", NextRequest(incarnation="a", numerics=numerics(), left_generation=2), 0.0)
        is None
    )
    assert membership.replicas[0].current is generation
    assert generation.incarnations == {"a": 1, "b": 2}


def test_one_that_was_lost_may_come_back_unless_another_was_started():
    membership = make_membership(2)
    ask(membership, "a")
    membership.drop_peer("a", "lost")
    ask(membership, "a")
    assert membership.present.is_current_incarnation("a", "a")
    membership.drop_peer("a", "lost")
    assert not membership.present.is_current_incarnation("a", "a")
    assert not membership.present.is_superseded("a", "a")
    ask(membership, "a", incarnation="z")
    assert membership.present.is_superseded("a", "a")
    assert ask(membership, "a", incarnation="a") == (None, None)
    assert membership.present.is_current_incarnation("a", "z")
    assert not membership.present.is_current_incarnation("b", "a")


def test_a_request_from_before_it_was_measured_does_not_make_one_unmeasured():
    membership = make_membership(3)
    ask(membership, "a", report=None)
    ask(membership, "a")
    ask(membership, "a", report=None)
    assert membership.present["a"].report == REPORT


def of_class(device_class, flops=1e9):
    return msgspec.structs.replace(
        REPORT, processor=msgspec.structs.replace(PROCESSOR, device_class=device_class, flops=flops)
    )


def partition_three(machines, up, down):
    """Three segments of the same work, as a hub's run partitions them."""
    needs = [SegmentNeeds(flops_per_token=1e6, memory_nbytes=1)] * 3
    traffic = Traffic(forward_nbytes=1e-6, backward_nbytes=1e-6)
    return make_partition(needs, machines, traffic, hub_up_bps=up, hub_down_bps=down)


def began(membership):
    """Records the placing of the current generation, as a hub's run does."""
    places = [
        membership.present[name].report.place(name, segments)
        for name, segments in membership.replicas[0].current.partition.stages
    ]
    membership.candidates.exactness.on_event(
        GenerationStarted(generation=membership.last_generation, step=0, peers=places)
    )
    return [(place.name, place.device_class) for place in places]


def regrouped(membership, lost, now=1.0):
    """Who computes after a peer is lost and the others have asked at once and at `now`."""
    others = [name for name in membership.replicas[0].current.names if name != lost]
    number = membership.last_generation
    membership.drop_peer(lost, "lost")
    for at in (0.0, now):
        for name in others:
            ask(membership, name, now=at, report=membership.present[name].report, left_generation=number)
    return None if membership.replicas[0].current is None else began(membership)


def run_of(exact, *classes, flops=()):
    membership = make_membership(3, partition_three, exact=exact)
    for index, each in enumerate(classes):
        ask(membership, f"p{index}", report=of_class(each, *flops[index : index + 1]))
    began(membership)
    return membership


def test_an_exact_run_waits_for_a_device_of_the_lost_class():
    membership = run_of(True, "x", "y", "y")
    ask(membership, "spare", report=of_class("z", flops=1e12))
    assert "its device does not compute the same bits" in membership.wait_reason("spare")
    assert regrouped(membership, "p0") is None, "the segment of x waits, although patience with too few is over"
    assert ask(membership, "p1", now=1e6, report=of_class("y"), left_generation=1)[1] is None
    assert "hub.exact keeps segments on the class of device that computed them" in membership.waits_for
    assert ask(membership, "late", now=1e6, report=of_class("x"))[1] is not None
    assert ("late", "x") in began(membership)
    assert membership.candidates.exactness.lost is None


def test_an_exact_run_names_those_whose_devices_cannot_take_part():
    membership = make_membership(2, partition_three, exact=True)
    for name in ("p0", "p1"):
        assert ask(membership, name, report=of_class(""))[1] is None
    excluded = "2 of 2 peers are connected, of which hub.exact excludes p0, p1: its device does not repeat its own bits"
    assert excluded in membership.waits_for
    assert "set debug.deterministic" in membership.wait_reason("p0")


def test_an_exact_run_moves_segments_among_devices_of_one_class():
    membership = run_of(True, "x", "y", "y")
    assert regrouped(membership, "p1", now=1e6) == [("p2", "y"), ("p0", "x")]
    assert membership.candidates.exactness.lost is None


def test_an_exact_run_takes_no_device_that_does_not_repeat_its_bits():
    membership = make_membership(2, partition_three, exact=True)
    for name, each in (("a", "x"), ("b", ""), ("c", "x")):
        ask(membership, name, report=of_class(each))
    assert sorted(membership.replicas[0].current.names) == ["a", "c"]


@pytest.mark.parametrize(("speed", "taken"), [(1.1e9, "like"), (1e10, "unlike")])
def test_other_runs_prefer_a_device_of_the_class_unless_another_is_much_faster(speed, taken):
    membership = run_of(False, "x", "x", "x")
    ask(membership, "like", report=of_class("x"))
    ask(membership, "unlike", report=of_class("y", flops=speed))
    names = dict(regrouped(membership, "p0"))
    assert (taken in names, membership.candidates.exactness.lost is None) == (True, taken == "like")


def test_the_owner_reads_whose_machine_is_measured_and_how_many_are_left():
    membership = make_membership(3)
    ask(membership, "a")
    _, measure = ask(membership, "b", report=None)
    assert measuring_text("b", measure, membership) == (
        "measuring the machine and the link of b, 2 of 3, for some seconds"
    )
    assert "all machines measure" in measuring_text("b", Measure(concurrent=True), membership)
