"""A shaped group keeps its line's times, order and bytes, between real processes."""

import pytest

from tests.transport.processes import cold_process, results, start
from thinpipe.transport.emulation.framing import wire_nbytes

MEGABYTE = 1_000_000


def seconds(nbytes, megabits):
    return wire_nbytes(nbytes) * 8 / (megabits * 1e6)


def near(value):
    """From just before its moment to 1.42 times as late: a busy machine is late, never early; a wrong law doubles."""
    return pytest.approx(1.2 * value, rel=0.22 / 1.2)


@pytest.fixture(scope="module")
def seen():
    return results(start(3, "tests.transport.emulated_transfers"))


def scene(seen, name):
    """Of the fastest take: when the first sender began, and what each process saw."""
    takes = []
    for parts in zip(*(process[name] for process in seen), strict=True):
        assert all(part["intact"] for part in parts)
        began = min(part["began"] for part in parts if part["left"])
        takes.append((max(moment for part in parts for moment in part["arrived"]) - began, began, parts))
    _, began, parts = min(takes, key=lambda take: take[0])
    assert all(part["posted"] - part["began"] < 0.05 for part in parts), "sending must not block"
    return began, parts


@pytest.mark.quiet
def test_a_transfer_takes_its_bytes_over_its_rate(seen):
    began, (sender, receiver, _) = scene(seen, "rate")
    assert receiver["arrived"][0] - began == near(seconds(2 * MEGABYTE, 80))
    assert sender["left"][0] - began == near(seconds(2 * MEGABYTE, 80))


@pytest.mark.quiet
def test_two_receivers_share_the_senders_uplink(seen):
    began, (_, first, second) = scene(seen, "up_shared")
    assert first["arrived"][0] - began == near(seconds(MEGABYTE, 80))
    assert second["arrived"][0] - began == near(2 * seconds(MEGABYTE, 80))


@pytest.mark.quiet
def test_two_senders_share_the_receivers_downlink(seen):
    began, (receiver, *senders) = scene(seen, "down_shared")
    assert max(receiver["arrived"]) - began == near(2 * seconds(MEGABYTE, 80))
    assert [sender["left"][0] - began for sender in senders] == [near(seconds(MEGABYTE, 80))] * 2


@pytest.mark.quiet
def test_equal_up_and_down_are_paid_once_and_a_slower_down_in_full(seen):
    began, (_, receiver, _) = scene(seen, "cut_through")
    assert receiver["arrived"][0] - began == near(seconds(2 * MEGABYTE, 80))
    began, (_, receiver, _) = scene(seen, "slow_down")
    assert receiver["arrived"][0] - began == near(seconds(MEGABYTE, 40))


@pytest.mark.quiet
def test_both_directions_at_once_take_the_time_of_one(seen):
    began, parts = scene(seen, "duplex")
    assert [part["arrived"][0] - began for part in parts[:2]] == [near(seconds(2 * MEGABYTE, 80))] * 2


@pytest.mark.quiet
def test_messages_in_flight_share_one_latency(seen):
    began, (_, receiver, _) = scene(seen, "latency")
    assert len(receiver["arrived"]) == 50
    assert receiver["arrived"][0] - began >= 0.04
    assert receiver["arrived"][-1] - began < 0.12  # one after another they would take 2 s


@pytest.mark.quiet
def test_messages_came_when_they_came_however_late_they_are_asked_for(seen):
    assert min(seen[1]["late"]["seconds"]) < seconds(MEGABYTE // 4, 80)


def test_messages_are_whole_and_jitter_keeps_the_order_in_which_they_were_posted(seen):
    scenes = [takes for process in seen for takes in process.values() if isinstance(takes, list)]
    assert all(take["intact"] for takes in scenes for take in takes)
    assert seen[1]["jitter"]["numbers"] == list(range(40))


@pytest.mark.quiet
def test_jitter_spreads_messages(seen):
    moments = seen[1]["jitter"]["moments"]
    assert moments[-1] - moments[0] > 0.01


def test_tags_do_not_wait_for_each_other_and_a_limit_ends_one_wait_only(seen):
    receiver = seen[1]["tags"]
    assert receiver["limited"] >= 0.2
    assert receiver["refused"] == "receiving 8 bytes from peer 0 (tag 1) did not end within 0.2 seconds"
    assert receiver["early"]
    assert receiver["values"] == [1, 2]


def test_torchs_own_functions_and_stages_run_on_it(seen):
    for process in seen:
        assert process["torch"]["token"] == 0
        assert process["torch"]["refusal"].startswith("a shaped group sends and receives only")
        assert process["torch"]["gradient_error"] < 1e-12


def test_a_killed_peer_is_an_error_at_once_and_nothing_keeps_a_process_alive():
    survivor, leaver, _ = results(start(3, "tests.transport.losses", process=cold_process), codes=[0, 0, -9])
    assert survivor["threads"] == leaver["threads"] == []
    assert survivor["last_words"] == 7.0
    for outcome in survivor["receiving"]:
        assert outcome["error"].startswith("receiving 4000 bytes from peer 2")
        assert outcome["seconds"] < 60, "sooner than it times out"
    for outcome in survivor["sending"]:
        assert outcome["error"].startswith("sending 4000 bytes to peer 2")
        assert outcome["seconds"] < 60, "sooner than it times out"
