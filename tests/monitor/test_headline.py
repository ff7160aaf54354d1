"""What a run does now, on whose machines, at what speed and what limits it, in a sentence each."""

import pytest

from tests.monitor.sample_events import link, peers, started, step
from thinpipe.core.events import Stopped
from thinpipe.core.hub_events import GenerationEnded, GenerationStarted
from thinpipe.monitor.headline import whose
from thinpipe.monitor.snapshot import StageStatus
from thinpipe.monitor.state import RunState
from thinpipe.monitor.terminal import headlines, plain_lines


def run_of(*events):
    state = RunState("r")
    for event in events:
        state.on_event(event)
    return state.snapshot()


BEGUN = GenerationStarted(
    generation=1,
    step=0,
    peers=peers("anna", "bert"),
    bottleneck="the processor of bert (1 TFLOP/s)",
    planned_tokens_per_second=1000.0,
)
SLOW = {"busy": [0.4, 0.95], "links": [link(0, True), link(0, False)]}
ENDED = GenerationEnded(generation=1, step=0, cause="left", peer="bert", reason="bert left")


@pytest.mark.parametrize(
    ("events", "now"),
    [
        ((), "nothing has happened yet"),
        ((BEGUN,), "making ready on anna and bert: connecting and loading the model"),
        ((BEGUN, started(), step(1)), "computing step 2 of 100 on anna and bert"),
        ((BEGUN, started(), step(100)), "computing step 100 of 100 on anna and bert"),
        (
            (BEGUN, started(), step(1), ENDED),
            "nothing is computed: bert left; the others make ready to go on",
        ),
        ((started(), step(100), Stopped(step=100, reason="finished")), "finished: all 100 steps are done"),
        ((started(), step(7), Stopped(step=7, reason="signal")), "stopped: signal, after step 7 of 100"),
        ((started(), step(1, busy=[0.5])), "computing step 2 of 100 on this run's one process"),
    ],
)
def test_what_happens_now(events, now):
    assert run_of(*events).now == now


def test_many_names_are_counted():
    stages = [StageStatus(name=f"p{index}", segments=[index]) for index in range(9)]
    assert whose(stages, has_hub=True) == "p0, p1, p2, p3, p4 and 4 others"
    assert whose(stages, has_hub=False) == "9 processes of this run"
    assert whose([], has_hub=True) == "nobody yet"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        (SLOW, "the processor of bert, busy for 95% of a step"),
        (
            SLOW | {"busy": [0.4, 0.5]},
            "messages between anna and bert: 25% of a step is spent waiting for them",
        ),
        (
            SLOW | {"busy": [0.4, 0.5], "links": [link(0, True, waited_s=0.1), link(0, False, waited_s=0.1)]},
            "no single machine: the busiest, bert, computes for 50% of a step. More micro-batches in flight would help",
        ),
    ],
)
def test_what_limits_it(fields, limit):
    assert run_of(BEGUN, started(), step(1, **fields)).limit == limit


def test_before_the_first_step_the_measurements_say_what_will():
    assert run_of(BEGUN, started()).limit == "expected from the measurements: the processor of bert (1 TFLOP/s)"


def test_speed_against_plan_and_the_rest_in_plain_lines():
    snapshot = run_of(BEGUN, started(), step(1, **SLOW))
    assert list(headlines(snapshot)) == [
        "now: computing step 2 of 100 on anna and bert",
        "speed: 500 tokens/s, 50% of 1,000 planned",
        "what limits it: the processor of bert, busy for 95% of a step",
    ]
    lines = list(plain_lines(snapshot, 1003.0))
    assert lines[0] == "r  running"
    assert lines[1:4] == list(headlines(snapshot))
    assert "loss 4.9900" in lines
    assert "bert, segment 1, waits 5%" in lines
    assert any(line.startswith("  boundary 0: ") for line in lines)
    assert not any("\n" in line or "\x1b" in line for line in lines)
    alone = run_of(started(), step(1))
    assert list(headlines(alone))[1] == "speed: 500 tokens/s", "without a hub there is no plan"
