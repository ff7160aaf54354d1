"""Several replicas under one membership: each has generations of its own, and standbys are everybody's."""

import pytest

from tests.swarm.hub.test_membership import PROCESSOR, REPORT, ask, make_membership, partition_all
from thinpipe.core.errors import UserError
from thinpipe.planning.replica_groups import deal
from thinpipe.swarm.hub.replica import GenerationEnd
from thinpipe.swarm.protocol.messages import MAX_UPLOAD_SECONDS, Measure

FOUR = ("a", "b", "c", "d")


def at_least_two(machines, up, down):
    """Pipelines of two peers; further machines wait."""
    if len(machines) < 2:
        raise UserError("too small")
    return partition_all(machines[:2], up, down)


def two_replicas(partitioner=at_least_two, wanted=4, **settings):
    membership = make_membership(wanted, partitioner, replicas=2, **settings)
    for name in FOUR:
        ask(membership, name)
    for name in FOUR:
        membership.next_for(name, 0.0)
    return membership


def names(membership):
    return [None if replica.current is None else replica.current.names for replica in membership.replicas]


def numbers(membership):
    return [replica.latest.number for replica in membership.replicas]


def test_nobody_is_in_two_replicas_and_each_has_a_generation_of_its_own():
    membership = two_replicas()
    first, second = names(membership)
    assert sorted(first + second) == [*FOUR]
    assert numbers(membership) == [1, 2]
    for generation in membership.running:
        for name in generation.names:
            assert membership.next_for(name, 0.0) is generation
            assert membership.generation_of(name) is generation


def test_all_are_awaited_before_the_first_begins():
    membership = make_membership(4, at_least_two, replicas=2)
    for name in FOUR[:3]:
        assert ask(membership, name, now=1e6) == (None, None)
    assert not membership.busy


def test_the_end_of_one_does_not_touch_the_other():
    membership = two_replicas()
    (lost, left), other = names(membership)
    over = membership.drop_peer(lost, "no_heartbeat", "it was lost")
    assert over == GenerationEnd("no_heartbeat", "it was lost", lost, generation=1)
    assert names(membership) == [None, other]
    assert ask(membership, left, left_generation=1) == (None, None), "the model does not fit on one machine"
    assert membership.busy
    assert set(ask(membership, lost, incarnation="b")[1].names) == {lost, left}
    assert numbers(membership) == [3, 2]


def test_a_standby_replaces_a_peer_of_either_replica():
    for index in range(2):
        membership = two_replicas()
        assert ask(membership, "e") == (None, None)
        assert "standby" in membership.wait_reason("e")
        lost, left = names(membership)[index]
        membership.drop_peer(lost, "left")
        generation = ask(membership, left, left_generation=index + 1)[1]
        assert sorted(generation.names) == sorted([left, "e"])
        assert membership.next_for("e", 0.0) is generation


def test_one_request_does_not_end_the_generation_of_another_replica():
    membership = two_replicas()
    first, second = names(membership)
    over, _ = ask(membership, second[0], left_generation=2)
    assert over.generation == 2
    assert names(membership) == [first, None]
    assert ask(membership, first[0], left_generation=0)[0] is None


def test_machines_of_two_ended_generations_are_dealt_anew():
    membership = two_replicas()
    for generation in list(membership.running):
        assert membership.end(generation, GenerationEnd("deadlock", "they wait")).generation == generation.number
    for name in FOUR:
        ask(membership, name, left_generation=2)
    for name in FOUR:
        membership.next_for(name, 0.0)
    first, second = names(membership)
    assert sorted(first + second) == [*FOUR]
    assert numbers(membership) == [3, 4]


def test_who_does_not_come_back_is_named_with_the_generation_it_has_not_left():
    membership = two_replicas()
    _, second = names(membership)
    membership.end(membership.replicas[1].current, GenerationEnd("deadlock", "they wait"))
    ask(membership, second[0], left_generation=2)
    assert membership.overdue(MAX_UPLOAD_SECONDS) == [(second[1], 2)]


def test_a_start_that_failed_leaves_the_other_replica_alone():
    membership = make_membership(4, at_least_two, replicas=2)
    for name in FOUR:
        ask(membership, name)
    running = membership.running[0]
    membership.next_for("d", 0.0)
    membership.cancel_start()
    assert membership.running == [running]
    assert membership.replicas[1].latest is None


def test_newcomers_are_measured_while_replicas_run_and_wait_for_a_commit():
    membership = two_replicas(partition_all)
    first, _ = names(membership)
    membership.drop_peer(first[0], "lost")
    ask(membership, first[1], left_generation=1)
    assert membership.next_for(first[1], 100.0).names == [first[1]]
    assert isinstance(ask(membership, "e", report=None)[1], Measure)
    ask(membership, "e")
    assert membership.on_commit().reason == "e can take part now"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_machine_is_dealt_to_one_group_and_groups_have_nearly_equal_memory(count):
    sizes = [16, 24, 8, 80, 12, 6, 24]
    machines = [
        REPORT.__class__(
            processor=PROCESSOR.__class__(device="cpu", threads=1, flops=1e9, memory_nbytes=size),
            up_bps=5.0,
            down_bps=5.0,
            latency_s=0.1,
            versions={},
        ).machine(f"m{index}")
        for index, size in enumerate(sizes)
    ]
    groups = deal(machines, count)
    assert sorted(machine.name for group in groups for machine in group) == [f"m{i}" for i in range(len(sizes))]
    held = [sum(machine.memory_nbytes for machine in group) for group in groups]
    assert max(held) - min(held) <= max(sizes)


def test_a_pipeline_that_fits_begins_though_two_replicas_wait():
    """Shared out, the machines would be too few for either."""
    membership = two_replicas(patience_seconds=10.0)
    (a, b), (c, d) = names(membership)
    membership.drop_peer(b, "lost")
    membership.drop_peer(d, "lost")
    ask(membership, a, left_generation=1)
    ask(membership, c, left_generation=2)
    assert membership.next_for(a, 9.0) is None
    assert sorted(membership.next_for(a, 10.0).names) == sorted([a, c])


def test_who_still_uploads_for_one_replica_is_not_given_to_another():
    membership = two_replicas()
    (a, b), (c, d) = names(membership)
    membership.end(membership.replicas[1].current, GenerationEnd("deadlock", "they wait"))
    membership.drop_peer(a, "left")
    assert ask(membership, b, left_generation=1)[1] is None, "c and d have not left generation 2 yet"
    ask(membership, c, left_generation=2)
    ask(membership, d, left_generation=2)
    assert membership.next_for(d, 0.0) is not None


def test_what_a_peer_did_last_is_that_of_its_newest_generation():
    membership = two_replicas(patience_seconds=10.0)
    (a, b), (c, d) = names(membership)
    for name in (a, c):
        membership.drop_peer(name, "lost")
    ask(membership, b, left_generation=1)
    ask(membership, d, left_generation=2)
    generation = membership.next_for(b, 10.0)
    assert membership.replica_of(d).latest is generation
    membership.end(generation, GenerationEnd("deadlock", "they wait"))
    assert membership.replica_of(d).latest is generation
