"""Assignments against all that are possible, for small pipelines; and what people are told when there is none."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.core.errors import UserError
from thinpipe.swarm.assign import Machine, Need, Traffic, assign

FAST = 1e9
TRAFFIC = Traffic(forward_nbytes=34, backward_nbytes=32)


def machine(name, flops=1e12, memory=10**10, bps=FAST):
    return Machine(name=name, flops=flops, memory_nbytes=memory, up_bps=bps, down_bps=bps)


def need(flops=1e9, memory=10**9):
    return Need(flops_per_token=flops, memory_nbytes=memory)


def slowest(places, needs, hub_bps):
    """Seconds per token of an assignment, worked out anew."""
    times = [(len(places) - 1) * TRAFFIC.bits / hub_bps]
    for host, segments in places:
        if sum(needs[index].memory_nbytes for index in segments) > host.memory_nbytes:
            return float("inf")
        times.append(sum(needs[index].flops_per_token for index in segments) / host.flops)
        if len(places) > 1:
            times.append(TRAFFIC.bits / min(host.up_bps, host.down_bps))
    return max(times)


def best_of_all(needs, machines, hub_bps):
    best = float("inf")
    for count in range(1, min(len(machines), len(needs)) + 1):
        for hosts in itertools.permutations(machines, count):
            for cuts in itertools.combinations(range(1, len(needs)), count - 1):
                edges = (0, *cuts, len(needs))
                places = [(host, range(edges[i], edges[i + 1])) for i, host in enumerate(hosts)]
                best = min(best, slowest(places, needs, hub_bps))
    return best


machines = st.lists(
    st.builds(
        lambda flops, memory, bps: (flops * 1e11, memory * 10**9, bps * 1e6),
        st.integers(1, 20),
        st.integers(1, 8),
        st.sampled_from([10, 80, 1000]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(given_machines=machines, count=st.integers(1, 6), hub=st.sampled_from([20e6, 1e9]))
def test_equal_segments_are_assigned_as_well_as_possible(given_machines, count, hub):
    hosts = [machine(f"p{i}", *facts) for i, facts in enumerate(given_machines)]
    needs = [need()] * count
    best = best_of_all(needs, hosts, hub)
    if best == float("inf"):
        with pytest.raises(UserError):
            assign(needs, hosts, TRAFFIC, hub_up_bps=hub, hub_down_bps=hub)
        return
    found = assign(needs, hosts, TRAFFIC, hub_up_bps=hub, hub_down_bps=hub)
    by_name = {host.name: host for host in hosts}
    places = [(by_name[name], segments) for name, segments in found.places]
    assert [index for _, segments in places for index in segments] == list(range(count))
    assert slowest(places, needs, hub) <= best * 1.001
    assert {name for name, _ in found.places} | set(found.spares) == set(by_name)


def test_uneven_machines_get_uneven_shares():
    found = assign(
        [need()] * 8, [machine("slow", 1e12), machine("fast", 3e12)], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST
    )
    assert found.places == (("slow", range(2)), ("fast", range(2, 8)))
    assert found.tokens_per_second == pytest.approx(500)


def test_the_bottleneck_is_named():
    two = [machine("a"), machine("b")]
    assert "processor of" in assign([need()] * 4, two, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST).bottleneck
    tight = [machine("a", memory=2 * 10**9), machine("b", memory=2 * 10**9)]
    assert assign([need()] * 4, tight, TRAFFIC, hub_up_bps=1e5, hub_down_bps=FAST).bottleneck == "the hub's line"
    slow = [machine("a", memory=2 * 10**9), machine("b", memory=2 * 10**9, bps=1e4)]
    assert assign([need()] * 4, slow, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST).bottleneck == "the line of b"


def test_a_machine_that_only_slows_the_others_down_is_a_spare():
    found = assign([need()] * 2, [machine("a"), machine("b", bps=1e4)], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    assert found.places == (("a", range(2)),)
    assert found.spares == ("b",)


def test_people_are_told_what_is_missing():
    small = machine("a", memory=500_000_000)
    with pytest.raises(UserError, match="segment 0 needs 1 GB, and the largest machine has 500 MB"):
        assign([need()] * 2, [small], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    with pytest.raises(UserError, match="another machine with 2 GB would help"):
        assign([need()] * 12, [machine("a")], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
