"""How often is committed, and how fast: numbers in, numbers out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinpipe.config.run import CheckpointConfig
from thinpipe.core.errors import UserError
from thinpipe.swarm.hub.commits.interval import (
    MARGIN,
    MIN_SECONDS,
    StepTimeEstimator,
    plan_commits,
    predict_step_seconds,
    upload_rates,
)

SOME = {
    "state_nbytes": [500e6, 250e6],
    "up_bps": [20e6, 20e6],
    "hub_down_bps": 1e9,
    "share": 0.25,
    "step_seconds": 2.0,
    "max_steps": 10_000,
}


def test_the_slowest_has_sent_its_part_before_the_next_commit_begins():
    plan = plan_commits(**SOME)
    assert plan.bytes_per_second == (625e3, 625e3), "a quarter of 20 Mbps"
    assert plan.send_seconds == 800
    assert plan.interval == 600, "1.5 x 800 s, in steps of 2 s"
    assert plan.in_words(2.0) == "a commit every 600 steps, about every 20 min"


def test_the_hubs_line_is_divided_so_that_all_are_done_together():
    rates = upload_rates([300.0, 100.0], [1e9, 1e9], 800.0, 0.5)
    assert rates == [37.5, 12.5]
    assert plan_commits(**SOME | {"hub_down_bps": 24e6}).send_seconds == pytest.approx(1000)
    assert plan_commits(**SOME | {"hub_down_bps": float("inf")}).send_seconds == 800, "it was not measured"


def test_an_interval_that_somebody_chose_stays():
    plan = plan_commits(**SOME, interval=1)
    assert (plan.interval, plan.bytes_per_second) == (1, (625e3, 625e3))
    assert plan.in_words(2.0) == "a commit every step, about every 14 min"


def test_steps_of_no_length_do_not_break_the_plan():
    """A peer may say that its steps took 1e-308 s."""
    assert plan_commits(**SOME | {"step_seconds": 1e-308}).interval == SOME["max_steps"]


@given(
    state=st.floats(1e3, 1e12),
    up=st.floats(1e5, 1e11),
    share=st.floats(0.01, 1),
    step=st.floats(1e-3, 1e3),
    most=st.integers(1, 10**6),
)
def test_always_the_least_interval_in_which_the_lines_are_free_again(state, up, share, step, most):
    plan = plan_commits(
        state_nbytes=[state], up_bps=[up], hub_down_bps=up, share=share, step_seconds=step, max_steps=most
    )
    wanted = max(MARGIN * plan.send_seconds, MIN_SECONDS)
    assert 1 <= plan.interval <= most
    assert plan.interval == most or plan.interval * step >= wanted * 0.999999
    assert plan.interval == 1 or (plan.interval - 1) * step < wanted


def test_an_upload_is_late_after_several_times_the_time_that_it_should_take():
    assert plan_commits(**SOME).deadlines == (3200, 1600)
    assert plan_commits(**SOME | {"state_nbytes": [1.0, 1.0]}).deadlines == (60, 60)


def test_a_step_takes_what_was_measured_in_proportion_to_what_was_predicted():
    seconds = StepTimeEstimator()
    assert seconds.begin(1.0) == 1.0
    known = []
    for _ in range(6):
        seconds.add(3.0)
        known.append((seconds.known, seconds.first))
    assert known == [(1.0, 1.0)] * 4 + [(3.0, 3.0)] * 2, "as predicted, until there are enough"
    for _ in range(20):
        seconds.add(4.0)
    assert (seconds.known, seconds.first) == (4.0, 3.0)
    for _ in range(20):
        seconds.add(3.0)
    assert seconds.begin(2.0) == 6.0, "steps were three times slower than predicted"
    seconds.add(0.0)
    assert seconds.known == 6.0
    assert seconds.begin(1.0) == 3.0, "nothing new was measured"


def test_what_a_step_should_take():
    seconds = predict_step_seconds(tokens=1000, tokens_per_second=500, microbatches=4, peers=3, latency_s=0.1)
    assert seconds == pytest.approx(2 * 6 / 4 + 5 * 0.1)
    alone = predict_step_seconds(tokens=1000, tokens_per_second=500, microbatches=4, peers=1, latency_s=0.0)
    assert alone == 2.0


def test_settings():
    assert CheckpointConfig().steps == 200
    assert CheckpointConfig(interval=7).steps == 7
    for wrong in ({"interval": 0}, {"uplink_share": 0.0}, {"uplink_share": 1.5}):
        with pytest.raises(UserError, match="checkpoint"):
            CheckpointConfig(**wrong)
