"""Assignments against all that are possible, for small pipelines; and what people are told when there is none."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinpipe.core.errors import UserError
from thinpipe.planning.partition import Machine, SegmentNeeds, Traffic, make_partition

FAST = 1e9
TRAFFIC = Traffic(forward_nbytes=34, backward_nbytes=32)
WITH_LABELS = Traffic(forward_nbytes=30, backward_nbytes=12, labels_nbytes=40)


def machine(name, flops=1e12, memory=10**10, up=FAST, down=FAST, excluded=frozenset(), host=None):
    return Machine(
        name=name,
        flops=flops,
        memory_nbytes=memory,
        host_memory_nbytes=host,
        up_bps=up,
        down_bps=down,
        excluded=excluded,
    )


def need(flops=1e9, memory=10**9, host=0):
    return SegmentNeeds(flops_per_token=flops, memory_nbytes=memory, host_nbytes=host)


def slowest(stages, needs, hub_bps, traffic):
    """Seconds per token of an assignment, worked out anew."""
    forward, backward, labels = 8 * traffic.forward_nbytes, 8 * traffic.backward_nbytes, 8 * traffic.labels_nbytes
    times = [(len(stages) - 1) * (forward + backward) / hub_bps]
    if len(stages) > 1:  # labels go from the first to the last
        (first, _), (last, _) = stages[0], stages[-1]
        times = [times[0] + labels / hub_bps, (forward + labels) / first.up_bps, (forward + labels) / last.down_bps]
    for index, (host, segments) in enumerate(stages):
        on_device = sum(needs[index].memory_nbytes for index in segments)
        on_host = sum(needs[index].host_nbytes for index in segments)
        if host.host_memory_nbytes is None:
            on_device, on_host = on_device + on_host, 0
        if on_device > host.memory_nbytes or on_host > (host.host_memory_nbytes or 0):
            return float("inf")
        if host.excluded.intersection(segments):
            return float("inf")
        times.append(sum(needs[index].flops_per_token for index in segments) / host.flops)
        if index > 0:  # states come in, gradients go out
            times += [forward / host.down_bps, backward / host.up_bps]
        if index < len(stages) - 1:
            times += [forward / host.up_bps, backward / host.down_bps]
        if 0 < index < len(stages) - 1:
            times += [(forward + backward) / host.up_bps, (forward + backward) / host.down_bps]
    return max(times)


def best_of_all(needs, machines, hub_bps, traffic):
    best = float("inf")
    for count in range(1, min(len(machines), len(needs)) + 1):
        for hosts in itertools.permutations(machines, count):
            for cuts in itertools.combinations(range(1, len(needs)), count - 1):
                edges = (0, *cuts, len(needs))
                stages = [(host, range(edges[i], edges[i + 1])) for i, host in enumerate(hosts)]
                best = min(best, slowest(stages, needs, hub_bps, traffic))
    return best


machines = st.lists(
    st.builds(
        lambda flops, memory, up, down, excluded, host: (
            *(flops * 1e11, memory * 10**9, up * 1e6, down * 1e6, excluded),
            host if host is None else host * 10**9,
        ),
        st.integers(1, 20),
        st.integers(1, 8),
        st.sampled_from([0.05, 0.2, 1, 10]),
        st.sampled_from([0.05, 0.2, 1, 10]),
        st.one_of(st.just(frozenset()), st.frozensets(st.integers(0, 5), max_size=3)),
        st.one_of(st.none(), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=4,
)
segments = st.lists(
    st.builds(
        lambda flops, memory, host: need(flops * 1e8, memory * 10**8, host * 10**8),
        st.integers(5, 30),
        st.integers(5, 25),
        st.sampled_from([0, 10, 20]),
    ),
    min_size=1,
    max_size=6,
)
"""As unlike each other as a segment with the head and one without."""


@settings(max_examples=300, deadline=None)
@given(
    given_machines=machines,
    needs=st.one_of(segments, st.integers(1, 6).map(lambda count: [need()] * count)),
    hub=st.sampled_from([1e5, 1e6, 1e9]),
    traffic=st.sampled_from([TRAFFIC, WITH_LABELS, Traffic(forward_nbytes=100, backward_nbytes=10)]),
)
def test_segments_are_assigned_as_well_as_possible(given_machines, needs, hub, traffic):
    """Processors, lines in either direction and the hub's link are the slowest part in turn."""
    hosts = [machine(f"p{i}", *facts) for i, facts in enumerate(given_machines)]
    best = best_of_all(needs, hosts, hub, traffic)
    if best == float("inf"):
        with pytest.raises(UserError):
            make_partition(needs, hosts, traffic, hub_up_bps=hub, hub_down_bps=hub)
        return
    found = make_partition(needs, hosts, traffic, hub_up_bps=hub, hub_down_bps=hub)
    by_name = {host.name: host for host in hosts}
    stages = [(by_name[name], segments) for name, segments in found.stages]
    assert [index for _, segments in stages for index in segments] == list(range(len(needs)))
    assert slowest(stages, needs, hub, traffic) <= best * 1.001
    assert found.tokens_per_second == pytest.approx(1 / slowest(stages, needs, hub, traffic))
    assert {name for name, _ in found.stages} | set(found.standbys) == set(by_name)


def test_who_could_have_all_that_is_left_leaves_the_first_segment_to_a_faster_link():
    """The first machine sends labels too, more than one in the middle sends gradients."""
    facts = [("p0", 2e11, 1e6, 1e6), ("p1", 2e11, 5e4, 1e7), ("p2", 7e11, 2e5, 2e5)]
    hosts = [machine(name, flops, up=up, down=down) for name, flops, up, down in facts]
    needs = [need(5e8, 4 * 10**9)] * 3
    found = make_partition(needs, hosts, WITH_LABELS, hub_up_bps=FAST, hub_down_bps=FAST)
    assert 1 / found.tokens_per_second == pytest.approx(best_of_all(needs, hosts, FAST, WITH_LABELS), rel=1e-3)


def test_uneven_machines_get_uneven_shares():
    found = make_partition(
        [need()] * 8, [machine("slow", 1e12), machine("fast", 3e12)], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST
    )
    assert found.stages == (("slow", range(2)), ("fast", range(2, 8)))
    assert found.tokens_per_second == pytest.approx(500)


def test_the_bottleneck_is_named():
    two = [machine("a"), machine("b")]
    found = make_partition([need()] * 4, two, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    assert found.bottleneck in ("the processor of a (1 TFLOP/s)", "the processor of b (1 TFLOP/s)")
    tight = [machine("a", memory=2 * 10**9), machine("b", memory=2 * 10**9)]
    found = make_partition([need()] * 4, tight, TRAFFIC, hub_up_bps=1e5, hub_down_bps=FAST)
    assert found.bottleneck == "the hub's link (up, 100 kbps)"
    slow = [machine("a", memory=2 * 10**9), machine("b", memory=2 * 10**9, up=1e4)]
    found = make_partition([need()] * 4, slow, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    assert found.bottleneck == "the link of b (up, 10 kbps)"
    assert found.stages[-1][0] == "b"  # gradients are a little shorter than states, and its line sends slowly
    assert found.loads[0] == (found.bottleneck, found.tokens_per_second)
    assert [rate for _, rate in found.loads] == sorted(rate for _, rate in found.loads)
    assert {"processor", "hub's"} <= {word for words, _ in found.loads for word in words.split()}


def test_a_line_carries_both_directions_at_once():
    three = [machine(name, memory=10**9, up=20e6, down=20e6) for name in "abc"]
    found = make_partition([need(flops=1)] * 3, three, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    assert found.tokens_per_second == pytest.approx(20e6 / (8 * (34 + 32)))


def test_a_machine_that_only_slows_the_others_down_is_a_standby():
    slow = machine("b", up=1e4, down=1e4)
    found = make_partition([need()] * 2, [machine("a"), slow], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    assert found.stages == (("a", range(2)),)
    assert found.standbys == ("b",)
    assert found.too_small == ()


def test_what_all_segments_share_is_counted_once_on_each_machine():
    pair = [machine("a", memory=3 * 10**9), machine("b", memory=3 * 10**9)]
    limits = {"hub_up_bps": FAST, "hub_down_bps": FAST}
    assert len(make_partition([need()] * 4, pair, TRAFFIC, shared_nbytes=10**9, **limits).stages) == 2
    with pytest.raises(UserError, match="would help"):
        make_partition([need()] * 5, pair, TRAFFIC, shared_nbytes=10**9, **limits)


def test_a_machine_that_holds_no_segment_is_told_how_much_is_missing():
    some = [machine("a"), machine("b", memory=600_000_000)]
    found = make_partition([need()] * 2, some, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST, shared_nbytes=100_000_000)
    assert found.too_small == ("b has 600 MB, and the smallest segment needs 1.1 GB: 500 MB are missing",)


def test_twenty_machines_are_assigned_in_seconds():
    many = [machine(f"p{i}", flops=(1 + i % 7) * 1e11, memory=(2 + i % 3) * 10**9, up=20e6) for i in range(20)]
    found = make_partition([need()] * 32, many, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    assert [index for _, segments in found.stages for index in segments] == list(range(32))


def test_people_are_told_what_is_missing():
    small = machine("a", memory=500_000_000)
    with pytest.raises(UserError, match="segment 0 needs 1 GB, and the largest machine has 500 MB"):
        make_partition([need()] * 2, [small], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    with pytest.raises(UserError, match="another machine with 2 GB would help"):
        make_partition([need()] * 12, [machine("a")], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)


def test_everyone_takes_part_if_that_is_wanted_and_possible():
    hosts = [machine("slow", 1e12), machine("fast", 9e12), machine("small", 2e12, memory=10**9)]
    rates = {"hub_up_bps": 1e3, "hub_down_bps": 1e3}
    alone = make_partition([need()] * 4, hosts, TRAFFIC, **rates)
    assert alone.stages == (("fast", range(4)),), "the hub's link is so slow that one alone is faster"
    found = make_partition([need()] * 4, hosts, TRAFFIC, use_all_peers=True, **rates)
    assert found.stages == (("slow", range(1)), ("small", range(1, 2)), ("fast", range(2, 4)))
    assert found.bottleneck == "the hub's link (up, 1 kbps)"
    fewer = make_partition([need()] * 4, hosts, TRAFFIC, use_all_peers=True, max_machines=2, **rates)
    assert {name for name, _ in fewer.stages} == {"fast", "small"}
    assert fewer.standbys == ("slow",)
    elsewhere = [replace(hosts[0], excluded=frozenset({0})), *hosts[1:]]
    limited = make_partition([need()] * 4, elsewhere, TRAFFIC, use_all_peers=True, **rates)
    assert limited.stages == (("small", range(1)), ("slow", range(1, 2)), ("fast", range(2, 4))), (
        "the slow one comes later"
    )
    crowd = make_partition([need()] * 2, hosts, TRAFFIC, use_all_peers=True, **rates)
    assert len(crowd.stages) == 2, "no more than there are segments"


def test_no_more_machines_than_there_may_be():
    hosts = [machine(name) for name in "abcd"]
    found = make_partition([need()] * 4, hosts, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST, max_machines=2)
    assert [len(segments) for _, segments in found.stages] == [2, 2]


def test_a_host_without_room_for_what_is_offloaded_is_said():
    cards = [machine("a", host=10**9), machine("b", host=10**9)]
    with pytest.raises(UserError, match=r"segment 1 needs 2 GB of host memory, .* the largest has 1 GB"):
        make_partition([need(), need(host=2 * 10**9)], cards, TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST)
    found = make_partition(
        [need(), need(host=2 * 10**9)], [machine("cpu")], TRAFFIC, hub_up_bps=FAST, hub_down_bps=FAST
    )
    assert found.stages == (("cpu", range(2)),)
