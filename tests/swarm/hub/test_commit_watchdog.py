"""Whether commits come, and what can be lost now: with a clock of the test."""

import pytest

from thinpipe.core.hub_events import CommitsOverdue, CommitsResumed
from thinpipe.swarm.hub.commits.watchdog import CommitWatchdog

PLAN, OWED = "a commit every 4 steps, about every 20 s", "bert has not uploaded blocks.1"
INTERVAL = 20.0


def started(committed=0, **more):
    watchdog = CommitWatchdog(committed)
    watchdog.begin(100.0, **{"startup_seconds": 300.0} | more)
    watchdog.on_step(110.0, committed + 1)
    return watchdog


def test_what_can_be_lost_is_the_time_since_the_step_of_the_newest_commit():
    watchdog = started()
    assert watchdog.work_at_risk(115.0) == 15.0, "since the generation began"
    watchdog.on_step(125.0, 4)
    watchdog.on_commit(4, announced=127.0)
    assert watchdog.work_at_risk(140.0) == 15.0, "the upload took some of it, and the step ended before"
    assert watchdog.in_words(140.0, PLAN, OWED) == f"{PLAN}; newest: step 4; at most 15 s of work can be lost now"
    watchdog.on_commit(8, announced=139.0)
    assert watchdog.work_at_risk(140.0) == 1.0, "whose end nobody has told"
    watchdog.end(150.0)
    assert watchdog.work_at_risk(160.0) == 0.0
    assert watchdog.in_words(160.0, PLAN, OWED) == PLAN


def test_after_three_intervals_it_is_said_who_owes_what_and_nothing_is_promised():
    watchdog = started()
    assert watchdog.check(169.0, INTERVAL, OWED) is None
    overdue = watchdog.check(171.0, INTERVAL, OWED)
    assert isinstance(overdue, CommitsOverdue)
    assert (overdue.step, overdue.seconds, overdue.reason) == (0, 61.0, OWED)
    assert watchdog.in_words(171.0, PLAN, OWED) == (
        f"NO COMMIT since step 0 ({OWED}): at most 71 s of work can be lost now, and more every moment"
    )
    assert watchdog.check(200.0, INTERVAL, OWED) is None, "it was said"
    assert watchdog.check(233.0, INTERVAL, OWED).seconds == 123.0, "twice as long"
    watchdog.on_commit(8, announced=234.0)
    resumed = watchdog.check(235.0, INTERVAL, OWED)
    assert isinstance(resumed, CommitsResumed)
    assert resumed.step == 8
    assert watchdog.check(236.0, INTERVAL, OWED) is None
    assert "NO COMMIT" not in watchdog.in_words(236.0, PLAN, OWED)


def test_time_counts_over_generations_and_not_between_them():
    watchdog = started()
    for ended in (130.0, 360.0):
        watchdog.end(ended)
        watchdog.begin(ended + 200.0, 300.0)
        watchdog.on_step(ended + 210.0, 1)
    assert watchdog.check(589.0, INTERVAL, OWED) is None, "20 s, 20 s and 19 s"
    assert watchdog.check(591.0, INTERVAL, OWED).seconds == 61.0


@pytest.mark.parametrize("interval", [0.0, 0.5])
def test_short_intervals_are_given_half_a_minute(interval):
    watchdog = started()
    assert watchdog.check(139.0, interval, OWED) is None
    assert watchdog.check(141.0, interval, OWED) is not None


def test_a_first_peer_that_reports_no_step_does_not_keep_it_quiet():
    watchdog = CommitWatchdog(0)
    watchdog.begin(100.0, startup_seconds=50.0)
    assert watchdog.check(209.0, INTERVAL, OWED) is None
    assert watchdog.check(211.0, INTERVAL, OWED) is not None
