"""The clock of a plan: closed forms, cases computed by hand, an independent model, and the line of a shaped run."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.simpy_oracle import Oracle
from thinpipe.config.link import LinkConfig
from thinpipe.pipeline.placement import SCHEDULE_LAYOUTS, stages_of
from thinpipe.planning.simulation.links import LinkSpec, nbytes_on_wire
from thinpipe.planning.simulation.schedule_actions import PassKind, action_lists
from thinpipe.planning.simulation.simulate import StageTimes, StepSpec, Timeline, simulate
from thinpipe.transport.emulation.framing import wire_nbytes
from thinpipe.transport.emulation.link import EmulatedLink

F, B = PassKind.FORWARD, PassKind.BACKWARD
MBIT = 1e6 / 8


def step_spec(schedule="1F1B", processes=2, microbatches=2, work=(1.0, 1.0, 1.0), link=None, extra=0, **more):
    stages = sum(map(len, stages_of(schedule, processes)))
    forward, inputs, weights = work
    return StepSpec(
        actions=action_lists(schedule, processes, microbatches, extra=extra),
        stage_times=[StageTimes(forward_s=forward, input_s=inputs, weight_s=weights)] * stages,
        links=[link or LinkSpec()] * processes,
        **{"forward_nbytes": 1_000_000, "backward_nbytes": 1_000_000, "framing": "none"} | more,
    )


def passes(timeline, what, process=None):
    return [span for span in timeline.spans if span.what == what and process in (None, span.process)]


# Closed forms


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("processes", "microbatches"), [(1, 3), (2, 2), (4, 8), (7, 20)])
def test_without_lines_a_step_is_as_long_as_its_passes_and_the_bubble(schedule, processes, microbatches):
    timeline = simulate(step_spec(schedule, processes, microbatches, work=(2.0, 3.0, 1.0)))
    assert timeline.seconds == pytest.approx((microbatches + processes - 1) * 6.0)
    assert timeline.bubble == pytest.approx((processes - 1) / (microbatches + processes - 1))
    assert timeline.busy == pytest.approx([microbatches * 6.0] * processes)


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_labels_take_the_lines_of_the_first_and_the_last_process(schedule):
    """With both stages in one process, as in V schedules, none are sent. They leave before the states."""
    link = LinkSpec(up_bps=8e6, down_bps=8e6)
    without, with_labels = (
        simulate(step_spec(schedule, 4, 4, link=link, labels_nbytes=nbytes)) for nbytes in (0, 250_000)
    )
    more = {name: with_labels.link_nbytes[name] - nbytes for name, nbytes in without.link_nbytes.items()}
    expected = 0 if schedule == "ZBVZeroBubble" else 4 * 250_000
    assert {name: nbytes for name, nbytes in more.items() if nbytes} == (
        {"up 0": expected, "down 3": expected} if expected else {}
    )
    assert without.seconds <= with_labels.seconds <= without.seconds + 2 * expected / 1e6
    sent = [span.start for span in passes(with_labels, "send", 0) if span.microbatch == 0 and span.link == "up 0"]
    assert (min(sent) == 0.0) == bool(expected)


@pytest.mark.parametrize(("processes", "microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_two_stages_a_process_halve_the_bubble(processes, microbatches):
    timeline = simulate(step_spec("Interleaved1F1B", processes, microbatches, work=(1.0, 1.0, 1.0)))
    assert timeline.seconds == pytest.approx(6 * microbatches + 3 * (processes - 1))


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_zero_bubble_has_less_of_one_than_interleaving(processes):
    interleaved, zero = (
        simulate(step_spec(schedule, processes, 4 * processes)) for schedule in ("Interleaved1F1B", "ZBVZeroBubble")
    )
    assert zero.bubble < interleaved.bubble / 2
    assert zero.busy == pytest.approx(interleaved.busy)


def test_the_first_stage_leaves_all_of_its_backward_pass_to_the_weights():
    timeline = simulate(step_spec("ZBVZeroBubble", 2, 4, work=(1.0, 2.0, 3.0)))
    lengths = {(span.what, span.stage == 0): span.end - span.start for span in timeline.spans if not span.link}
    assert lengths == {
        ("forward", True): 1,
        ("forward", False): 1,
        ("input", True): 0,
        ("input", False): 2,
        ("weight", True): 5,
        ("weight", False): 3,
    }


def test_a_pipe_that_is_full_goes_at_the_pace_of_its_line():
    """Latency costs once, if enough is under way; each message takes its 0.5 s on an uplink of 16 Mbps."""
    link = LinkSpec(up_bps=16e6, down_bps=inf, latency_s=1.0)
    short, long = (simulate(step_spec("GPipe", 2, count, (0.01, 0.01, 0.01), link)).seconds for count in (20, 30))
    assert long - short == pytest.approx(10 * (0.5 + 0.5))


# By hand


def test_two_processes_and_one_line():
    """Passes of 1 s and 2 s, messages of 0.5 s, 0.1 s of latency."""
    link = LinkSpec(up_bps=16e6, down_bps=16e6, latency_s=0.1)
    timeline = simulate(step_spec("1F1B", 2, 2, link=link))
    spans = {
        (span.what, span.process, span.microbatch): (span.start, span.end) for span in timeline.spans if not span.link
    }
    # Process 0: F0 F1, then waits for gradients; process 1: F0 when it has come, B0, F1, B1.
    assert spans["forward", 0, 0] == (0.0, 1.0)
    assert spans["forward", 0, 1] == (1.0, 2.0)
    assert spans["forward", 1, 0] == pytest.approx((1.6, 2.6))
    assert spans["backward", 1, 0] == pytest.approx((2.6, 4.6))
    assert spans["forward", 1, 1] == pytest.approx((4.6, 5.6))
    assert spans["backward", 0, 0] == pytest.approx((5.2, 7.2))
    assert spans["backward", 1, 1] == pytest.approx((5.6, 7.6))
    assert spans["backward", 0, 1] == pytest.approx((8.2, 10.2))
    assert timeline.seconds == pytest.approx(10.2)
    assert timeline.link_busy == pytest.approx({"up 0": 1.0, "down 0": 1.0, "up 1": 1.0, "down 1": 1.0})
    assert timeline.link_nbytes == {"up 0": 2_000_000, "down 0": 2_000_000, "up 1": 2_000_000, "down 1": 2_000_000}
    (first, second) = [(span.start, span.end) for span in timeline.spans if span.link == "up 0"]
    assert first == pytest.approx((1.0, 1.5))
    assert second == pytest.approx((2.0, 2.5))


def arrivals(link, *, count=3, work=(0.0, 0.0, 0.0), **more):
    """When the forward passes of the second process begin, with GPipe and instant passes."""
    timeline = simulate(step_spec("GPipe", 2, count, work, link, **more))
    return [span.start for span in passes(timeline, "forward", 1)]


def test_latency_is_paid_once_or_for_each_message():
    assert arrivals(LinkSpec(up_bps=8e6, latency_s=0.25)) == pytest.approx([1.25, 2.25, 3.25])
    assert arrivals(LinkSpec(up_bps=8e6, latency_s=0.25, latency_per="message")) == pytest.approx([1.25, 2.5, 3.75])


def test_a_slow_downlink_is_a_queue_that_messages_enter_while_they_arrive():
    assert arrivals(LinkSpec(up_bps=8e6, down_bps=4e6, latency_s=0.25)) == pytest.approx([2.25, 4.25, 6.25])
    assert arrivals(LinkSpec(up_bps=8e6, down_bps=16e6, latency_s=0.25)) == pytest.approx([1.25, 2.25, 3.25])


def test_both_directions_of_a_shared_link_wait_for_each_other():
    """Two middle processes would send states and gradients at once; on one clock they take twice as long."""
    full, shared = (
        simulate(step_spec("1F1B", 4, 40, (0.001, 0.001, 0.001), LinkSpec(up_bps=8e6, down_bps=8e6, duplex=duplex)))
        for duplex in ("full", "shared")
    )
    assert full.link_busy["up 1"] == full.link_busy["down 1"] == pytest.approx(80.0)
    assert shared.link_busy["link 1"] == pytest.approx(160.0)
    assert shared.seconds > 160.0 > full.seconds > 80.0


def test_a_hub_is_a_second_trip_and_everybody_shares_it():
    peer, hub = LinkSpec(up_bps=8e6, down_bps=8e6, latency_s=0.1), LinkSpec(up_bps=16e6, down_bps=16e6, latency_s=0.2)
    # Up in 1 s, at the hub 0.3 s later; out in 0.5 s, 0.3 s of latency, and then 0.5 s more for a downlink of 1 s.
    assert arrivals(peer, hub=hub) == pytest.approx([2.6, 3.6, 4.6])
    timeline = simulate(step_spec("GPipe", 3, 4, (0.0, 0.0, 0.0), peer, hub=hub))
    assert timeline.link_nbytes["hub up"] == timeline.link_nbytes["hub down"] == 2 * 2 * 4 * 1_000_000
    assert timeline.link_busy["hub up"] == pytest.approx(8.0)


def test_large_messages_pass_a_hub_in_pieces():
    """Of 1 MiB: all but the last have gone on when the last has come."""
    peer, hub, nbytes = LinkSpec(up_bps=8e6), LinkSpec(up_bps=8e6), 4 << 20
    (arrival,) = arrivals(peer, hub=hub, count=1, forward_nbytes=nbytes)
    assert arrival == pytest.approx((nbytes + (1 << 20)) / 1e6)


def test_processes_of_one_host_share_its_cores():
    """Two processes on one core: what overlapped takes twice as long."""
    apart = simulate(step_spec("GPipe", 2, 2))
    together = simulate(step_spec("GPipe", 2, 2, hosts=[5, 5], cores={5: 1.0}))
    assert apart.seconds == pytest.approx(3 * 3.0)
    assert together.seconds == pytest.approx(4 * 3.0)  # all the work, as nobody ever waits for a message
    assert simulate(step_spec("GPipe", 2, 2, hosts=[5, 5], cores={5: 2.0})).seconds == apart.seconds
    half = simulate(step_spec("GPipe", 1, 2, hosts=[0], cores={0: 0.5}))
    assert half.seconds == pytest.approx(12.0)


def test_the_exchange_goes_through_the_last_process_or_the_hub():
    link = LinkSpec(up_bps=8e6, latency_s=0.1)
    nothing = {"forward_nbytes": 0, "backward_nbytes": 0, "work": (0.0, 0.0, 0.0), "allreduce_nbytes": 1_000_000}
    # Each message is there after 0.1 s, and so gradients after 0.4 s; the numbers after 1.1 s more. Two answers leave
    # one after the other, after which the last process goes on; the second is there 0.1 s later.
    direct = simulate(step_spec("GPipe", 3, 1, link=link, optimiser_s=[0.5, 0.5, 0.25], **nothing))
    assert [span.end for span in sorted(passes(direct, "optimiser"))] == pytest.approx([3.1, 4.1, 3.75])
    assert direct.seconds == pytest.approx(4.1)
    hub = LinkSpec(up_bps=80e6)
    through_hub = simulate(step_spec("GPipe", 3, 1, link=link, hub=hub, **nothing))
    # Through the hub a message is there after 0.2 s; numbers go to it and come back, three answers one after the other.
    assert through_hub.seconds == pytest.approx(0.8 + 1.1 + 0.3 + 0.1)
    without = simulate(step_spec("GPipe", 3, 1, link=link, **nothing | {"allreduce_nbytes": 0}))
    assert without.seconds == pytest.approx(0.4)


def test_spans_are_optional_and_the_same_job_takes_the_same_time():
    one = step_spec(
        "Interleaved1F1B", 3, 6, link=LinkSpec(up_bps=2e6, down_bps=1e7, latency_s=0.3), hub=LinkSpec(up_bps=5e6)
    )
    first, again, bare = simulate(one), simulate(one), simulate(one, record=False)
    assert first == again
    assert bare == Timeline(first.seconds, [], first.busy, first.link_busy, first.link_nbytes)


# Against others


def random_step_spec(schedule, processes, microbatches, extra, with_hub, sharing, exchange, seed):
    draw = random.Random(seed)

    def link(least=1e5):
        return LinkSpec(
            up_bps=draw.choice([inf, draw.uniform(least, 20 * least)]),
            down_bps=draw.choice([inf, draw.uniform(least, 20 * least)]),
            latency_s=draw.choice([0.0, draw.uniform(0, 0.3)]),
            duplex=draw.choice(["full", "full", "shared"]),
            latency_per=draw.choice(["pipelined", "pipelined", "message"]),
        )

    stages = sum(map(len, stages_of(schedule, processes)))
    return StepSpec(
        actions=action_lists(schedule, processes, microbatches, extra=extra if schedule == "1F1B" else 0),
        stage_times=[
            StageTimes(forward_s=draw.uniform(0.01, 1), input_s=draw.uniform(0.01, 1), weight_s=draw.uniform(0.01, 1))
            for _ in range(stages)
        ],
        links=[link() for _ in range(processes)],
        hub=link(1e6) if with_hub else None,
        forward_nbytes=draw.choice([1_000, 30_000, 3_000_000]),
        backward_nbytes=draw.choice([1_000, 30_000]),
        hosts=[draw.randrange(2) for _ in range(processes)] if sharing else None,
        cores={0: draw.uniform(0.5, 2.5), 1: draw.uniform(0.5, 2.5)} if sharing else None,
        allreduce_nbytes=exchange,
        optimiser_s=[draw.uniform(0, 1) for _ in range(processes)] if draw.random() < 0.5 else [],
    )


@settings(max_examples=60, deadline=None)
@given(
    schedule=st.sampled_from(list(SCHEDULE_LAYOUTS)),
    processes=st.integers(1, 4),
    rounds=st.integers(1, 3),
    extra=st.integers(0, 2),
    with_hub=st.booleans(),
    sharing=st.booleans(),
    exchange=st.sampled_from([0, 500, 20_000]),
    seed=st.integers(0, 10**9),
)
def test_simpy_says_the_same(schedule, processes, rounds, extra, with_hub, sharing, exchange, seed):
    one = random_step_spec(schedule, processes, rounds * processes, extra, with_hub, sharing, exchange, seed)
    ours, theirs = simulate(one), Oracle(one)
    names = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
    found = {
        (span.process, span.stage, names[span.what], span.microbatch): (span.start, span.end)
        for span in ours.spans
        if span.what in names
    }
    assert found.keys() == theirs.passes.keys()
    for key, times in found.items():
        assert times == pytest.approx(theirs.passes[key], abs=1e-6), key
    assert ours.seconds == pytest.approx(max(theirs.ended), abs=1e-6)


@pytest.mark.parametrize(("up", "down"), [("8mbps", "8mbps"), ("8mbps", "2mbps"), (None, "3mbps"), ("2mbps", None)])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_the_emulated_link_gives_the_same_times(up, down, schedule):
    """Its `send` is called when passes end, its `receive` when messages arrive: what
    `transport/emulation/shaped_group.py` does."""
    link = LinkConfig(up=up, down=down, latency="30ms")
    spec = LinkSpec(up_bps=link.up_bps, down_bps=link.down_bps, latency_s=link.latency_s)
    sizes = {"forward": 30_000, "backward": 50_000}
    timeline = simulate(
        step_spec(
            schedule, 4, 8, (0.01, 0.02, 0.013), spec, framing="gloo", forward_nbytes=30_000, backward_nbytes=50_000
        )
    )
    links = [EmulatedLink(link, seed=0) for _ in range(4)]
    sent = []
    for span in sorted((span for span in timeline.spans if not span.link), key=lambda span: span.end):
        target = span.process + (1 if span.what == "forward" else -1)
        if 0 <= target < 4:
            journey = links[span.process].send(sizes[span.what], target, span.end)
            sent.append((journey.arrives, target, span))
    begun = {(span.process, span.what, span.microbatch): span.start for span in timeline.spans if not span.link}
    before = previous_ends(timeline)
    for arrives, target, span in sorted(sent, key=lambda one: one[0]):
        there = links[target].receive(sizes[span.what], arrives)
        key = (target, span.what, span.microbatch)
        assert begun[key] == pytest.approx(max(there, before[key]))


def previous_ends(timeline: Timeline) -> dict[tuple[int, str, int], float]:
    """When each pass's process had finished the pass before it."""
    ends: dict[int, float] = {}
    found = {}
    for span in sorted((span for span in timeline.spans if not span.link), key=lambda span: span.start):
        found[span.process, span.what, span.microbatch] = ends.get(span.process, 0.0)
        ends[span.process] = span.end
    return found


def test_what_the_wire_adds():
    assert nbytes_on_wire(1_000, "none") == 1_000
    assert nbytes_on_wire(1_000, "gloo") == wire_nbytes(1_000)
    assert nbytes_on_wire(1_000, "nats") == 1_000 + 64 + 66
    assert nbytes_on_wire(3 << 20, "nats") - (3 << 20) == 3 * 64 + 66 * -(-((3 << 20) + 3 * 64) // 1448)
